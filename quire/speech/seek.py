"""Where the next part of a window begins, after a model has stopped before the window's end."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speech.segments import SegmentSpan
from quire.speech.speech_stretches import SpeechStretches

LEAST_ADVANCE = 0.5  # seconds between the beginnings of two parts
LEAD = 0.3  # seconds of silence before the speech of a part


def next_start(
    spans: Sequence[SegmentSpan], timestamp: float | None, speech: SpeechStretches, *, expects_more: bool
) -> float | None:
    """Return the second at which the next part begins, at least half a second; None if all has been transcribed.

    It begins where the last segment ended, as in whisper's own loop, or shortly before the next speech if there is
    silence in between: a model that hears silence first makes up words. Text that no timestamp ends is kept, unlike in
    that loop, which cuts windows anywhere: ours end at quiet places.

    Args:
        spans: segments of this part, with the times of their words.
        timestamp: the last timestamp that the model wrote.
        speech: where somebody speaks in this part.
        expects_more: the model has begun a further segment. It is believed where voice activity finds no speech at all,
            as in music.
    """
    if not speech.stretches:
        return max(timestamp, LEAST_ADVANCE) if spans and expects_more and timestamp is not None else None
    end = spans[-1].end if spans else 0.0
    if spans and timestamp is not None and (stretch := speech.around(end, end)) is not None:
        end = max(end, min(timestamp, stretch[1]))
    later = speech.after(end).stretches
    if not later:
        return None
    start = max(end, later[0][0] - LEAD)
    if not spans and start < LEAST_ADVANCE:  # there is speech, and the model has heard none
        return None
    return max(start, LEAST_ADVANCE)

"""Where the next part of a window begins, after a model has stopped before the window's end."""

from __future__ import annotations

from collections.abc import Sequence

from quire.api.serving.transcription.segments import SegmentSpan
from quire.api.serving.transcription.speech_stretches import SpeechStretches

LEAST_ADVANCE = 0.5  # seconds between the beginnings of two parts
_LEAD = 0.3  # seconds of silence before the speech of a part


def next_start(
    spans: Sequence[SegmentSpan], timestamp: float | None, speech: SpeechStretches, *, goes_on: bool
) -> float | None:
    """Return the second at which the next part begins, at least `LEAST_ADVANCE`; None if all has been transcribed.

    It begins where the last segment ended, as with whisper's own loop, or shortly before the next speech if there is
    silence in between: a model that hears silence first makes up words, and its first timestamp is too early.

    Args:
        spans: segments of this part, with the times of their words.
        timestamp: the last timestamp that the model wrote.
        speech: where somebody speaks in this part.
        goes_on: the model has more to say, although voice activity may find no more speech.
    """
    end = spans[-1].end if spans else 0.0
    if spans and timestamp is not None and (stretch := speech.around(end, end)) is not None:
        end = max(end, min(timestamp, stretch[1]))
    later = speech.after(end).stretches
    if not later and not goes_on:
        return None
    start = max(end, later[0][0] - _LEAD) if later else end
    if not spans and start < LEAST_ADVANCE:  # there is speech, and the model has heard none
        return None
    return max(start, LEAST_ADVANCE)

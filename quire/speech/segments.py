"""Segments of a window: the text between its timestamps, and where the next part begins behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quire.speech.speech_stretches import SpeechStretches
from quire.speech.tokens import TranscriptionTokens
from quire.speech.words import WordTokens

LEAST_ADVANCE = 0.5  # seconds between the beginnings of two parts
LEAD = 0.3  # seconds of silence before the speech of a part
_PAUSE = 1.0  # seconds between two words that end a segment


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A segment before it has a text.

    Attributes:
        start, end: seconds from the start of the window.
        first, last: indices of its text tokens among those of the window; `last` is not included.
        tokens: tokens of the text, with its timestamps.
    """

    start: float
    end: float
    first: int
    last: int
    tokens: tuple[int, ...]


def spans_of(output: Sequence[int], tokens: TranscriptionTokens, seconds: float) -> list[SegmentSpan]:
    """The segments in the tokens of a window.

    A timestamp ends the text before it and begins the text behind it. Text before the first one begins with the window,
    and text behind the last one ends with it, as does all text if the model wrote no timestamps.

    Args:
        output: all generated tokens.
        tokens: special tokens of the model.
        seconds: length of the window, which no time exceeds.
    """
    spans: list[SegmentSpan] = []
    start, first, count = 0.0, 0, 0
    segment_tokens: list[int] = []

    def close(end: float) -> None:
        if count > first:
            spans.append(SegmentSpan(start, max(start, end), first, count, tuple(segment_tokens)))

    for token in output:
        if tokens.is_timestamp(token):
            time = min(tokens.seconds(token), seconds)
            if count > first:
                segment_tokens.append(token)
            close(time)
            start, first, segment_tokens = (max(start, time) if spans else time), count, [token]
        elif tokens.is_text(token):
            segment_tokens.append(token)
            count += 1
    close(seconds)
    return spans


def within_segments(words: Sequence[WordTokens], spans: Sequence[SegmentSpan]) -> None:
    """Cut off what of the first and the last word is outside of their segment, where no speech was found.

    Pauses belong to one of the words beside them then, as the path through the alignment leaves out no frame.
    """
    for span in spans:
        members = [word for word in words if span.first <= word.first < span.last]
        if members:
            members[0].start = max(members[0].start, min(span.start, members[0].end))
            members[-1].end = min(members[-1].end, max(span.end, members[-1].start))


def spans_of_words(
    spans: Sequence[SegmentSpan], words: Sequence[WordTokens], tokens: TranscriptionTokens
) -> list[SegmentSpan]:
    """Return the segments with the times of their words, which voice activity has checked, divided at long pauses.

    A model's own timestamps may be a second wrong, and more behind a pause: the first one is early in its window.
    """
    parts: list[SegmentSpan] = []
    for span in spans:
        # A segment without words, such as a note sign, stands behind the one before it.
        before = parts[-1].end if parts else 0.0
        parts += _with_times(span, words, tokens, before)
    return parts


def _with_times(
    span: SegmentSpan, words: Sequence[WordTokens], tokens: TranscriptionTokens, before: float
) -> Iterator[SegmentSpan]:
    groups = list(_between_pauses([word for word in words if span.first <= word.first < span.last]))
    if not groups:
        yield replace(span, start=before, end=before)
        return
    opening = 1 if tokens.is_timestamp(span.tokens[0]) else 0  # the text begins behind it
    bounds = [span.first, *(group[0].first for group in groups[1:]), span.last]
    for group, (first, last) in zip(groups, pairwise(bounds), strict=True):
        begin = 0 if first == span.first else opening + first - span.first
        end = len(span.tokens) if last == span.last else opening + last - span.first
        yield SegmentSpan(group[0].start, group[-1].end, first, last, span.tokens[begin:end])


def _between_pauses(words: Sequence[WordTokens]) -> Iterator[Sequence[WordTokens]]:
    begin = 0
    for index in range(1, len(words) + 1):
        if index == len(words) or words[index].start - words[index - 1].end >= _PAUSE:
            yield words[begin:index]
            begin = index


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

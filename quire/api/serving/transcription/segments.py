"""Segments of a window: the text between its timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.serving.transcription.tokens import TranscriptionTokens


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
    own: list[int] = []

    def close(end: float) -> None:
        if count > first:
            spans.append(SegmentSpan(start, max(start, end), first, count, tuple(own)))

    for token in output:
        if tokens.is_timestamp(token):
            time = min(tokens.seconds(token), seconds)
            if count > first:
                own.append(token)
            close(time)
            start, first, own = (max(start, time) if spans else time), count, [token]
        elif tokens.is_text(token):
            own.append(token)
            count += 1
    close(seconds)
    return spans

"""Word timestamps, from the alignment of tokens with frames of the audio."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.speech.speech_stretches import SpeechStretches
from quire.speech.tokens import TranscriptionTokens

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages that do not put spaces between words
_OPENING = "\"'“‘「『（《【¿([{"  # punctuation that belongs to the word behind it
_LATE = 0.6  # seconds by which the alignment may be late or early
_SHORTEST = 4  # frames of a word
_DIAGONAL, _UP, _LEFT = 0, 1, 2


@dataclass(slots=True)
class WordTokens:
    """A word of several tokens.

    Attributes:
        first, last: indices of its tokens; `last` is not included.
        spoken: `last` without the punctuation at its end, which takes a pause.
        start, end: times in seconds from the start of the window, once they are known.
    """

    text: str
    first: int
    last: int
    spoken: int
    start: float = 0.0
    end: float = 0.0


def timed_words(
    alignment: NDArray[np.float32],
    text_tokens: Sequence[int],
    tokens: TranscriptionTokens,
    language: str | None,
    speech: SpeechStretches,
    bounds: Collection[int],
) -> list[WordTokens]:
    """The words of a window with their times. Takes some milliseconds.

    Tokens are aligned with frames that hold speech, so that no word takes a pause.

    Args:
        alignment: (len(text_tokens) + 1, frames); the last row is that of the end.
        text_tokens: text tokens of the window.
        tokens: special tokens of the model.
        language: ISO code.
        speech: where somebody speaks in the window.
        bounds: indices of the tokens with which segments begin.
    """
    precision = tokens.info.time_precision
    frames = speech.frames(alignment.shape[1], precision)
    starts = starts_of_tokens(alignment[:, frames])
    words = [word for word in words_of(text_tokens, tokens, language) if word.text.strip()]
    for before, word, behind in zip([None, *words], words, [*words[1:], None], strict=False):
        opens = before is None or any(before.first < bound <= word.first for bound in bounds)
        closes = behind is None or any(word.first < bound <= behind.first for bound in bounds)
        first, last = int(starts[word.first]), int(starts[word.spoken])
        run = _run(frames[first:last], opens=opens, closes=closes)
        if len(run):
            word.start, word.end = float(run[0] * precision), float((run[-1] + 1) * precision)
        else:
            place = frames[first - 1] + 1 if closes and first else frames[first]
            word.start = word.end = float(place * precision)
    _fill_stretches(words, speech)
    return words


def _run(frames: NDArray[np.int64], *, opens: bool, closes: bool) -> NDArray[np.int64]:
    """The frames of a word on one side of a pause: behind it if the word begins a segment, before it if it ends one."""
    runs = np.split(frames, np.flatnonzero(np.diff(frames) > 1) + 1)
    spoken = [run for run in runs if len(run) >= _SHORTEST]
    if spoken and opens != closes:
        return spoken[-1 if opens else 0]
    return max(runs, key=len)


def _fill_stretches(words: Sequence[WordTokens], speech: SpeechStretches) -> None:
    """Let the first and the last word of a stretch reach its ends, as the alignment may be late or early there."""
    for index, word in enumerate(words):
        if (stretch := speech.around(word.start, word.end)) is None:
            continue
        if 0 < word.start - stretch[0] <= _LATE and (index == 0 or words[index - 1].end <= stretch[0]):
            word.start = stretch[0]
        if 0 < stretch[1] - word.end <= _LATE and (index + 1 == len(words) or words[index + 1].start >= stretch[1]):
            word.end = stretch[1]


def starts_of_tokens(alignment: NDArray[np.float32]) -> NDArray[np.int64]:
    """The frame at which each token begins, by dynamic time warping.

    Args:
        alignment: (tokens, frames); larger is closer.

    Returns:
        Array of shape (tokens,), not decreasing.
    """
    rows, columns = _warp(-alignment.astype(np.float64))
    changes = np.diff(rows, prepend=-1) > 0
    return columns[changes]


def _warp(distance: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The monotonic path from the first to the last cell whose distances have the smallest sum.

    Cells of one anti-diagonal depend only on those before it, so they are computed at once.
    """
    height, width = distance.shape
    stride = width + 1
    cost = np.full((height + 1) * stride, np.inf)
    trace = np.full((height + 1, stride), -1, np.int8)
    cost[0] = 0.0
    flat = trace.reshape(-1)
    for diagonal in range(2, height + width + 1):
        first, last = max(1, diagonal - width), min(height, diagonal - 1)
        begin = first * stride + diagonal - first
        cells = slice(begin, begin + (last - first) * width + 1, width)
        count = last - first + 1
        both = cost[begin - stride - 1 :: width][:count]
        up = cost[begin - stride :: width][:count]
        left = cost[begin - 1 :: width][:count]
        choice = np.where((both < up) & (both < left), _DIAGONAL, np.where((up < both) & (up < left), _UP, _LEFT))
        row = np.arange(first, last + 1)
        cost[cells] = distance[row - 1, diagonal - row - 1] + np.minimum(both, np.minimum(up, left))
        flat[cells] = choice
    return _path(trace, height, width)


def _path(trace: NDArray[np.int8], row: int, column: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    trace[0, :], trace[:, 0] = _LEFT, _UP
    rows, columns = [], []
    while row > 0 or column > 0:
        rows.append(row - 1)
        columns.append(column - 1)
        step = trace[row, column]
        row -= step != _LEFT
        column -= step != _UP
    return np.array(rows[::-1]), np.array(columns[::-1])


def words_of(text_tokens: Sequence[int], tokens: TranscriptionTokens, language: str | None) -> list[WordTokens]:
    """The words in the text tokens of a window. All tokens are in exactly one word.

    A word begins with a space; in languages without spaces each character is one, with the punctuation at its sides.
    """
    words: list[WordTokens] = []
    spaced = language not in _WITHOUT_SPACES
    opened = False  # the last word is only opening punctuation
    for piece in _characters(text_tokens, tokens):
        mark = piece.text.strip()
        silent = all(not char.isalnum() for char in mark)
        begins = (
            piece.text[:1].isspace() if spaced else not opened and (not silent or (mark != "" and mark in _OPENING))
        )
        if begins or not words:
            words.append(piece)
        else:
            words[-1].text += piece.text
            words[-1].last = piece.last
            if not silent:
                words[-1].spoken = piece.last
        opened = silent and mark != "" and mark in _OPENING and words[-1].text.strip() == mark
    return words


def _characters(text_tokens: Sequence[int], tokens: TranscriptionTokens) -> list[WordTokens]:
    """Tokens grouped so that each group ends with a character: a character may take several tokens."""
    groups: list[WordTokens] = []
    content, first = b"", 0
    for index, token in enumerate(text_tokens):
        content += tokens.text_bytes(token)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        groups.append(WordTokens(text, first, index + 1, index + 1))
        content, first = b"", index + 1
    if first < len(text_tokens):
        count = len(text_tokens)
        groups.append(WordTokens(content.decode(errors="replace"), first, count, count))
    return groups

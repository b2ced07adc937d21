"""Words and segments from tokens with known positions in the audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.speech.segments import SegmentSpan
from quire.speech.types import Word

_PAUSE = 0.5  # seconds between two words that end a segment
_LONGEST = 7.0  # seconds of a segment, as long as a subtitle should be shown


@dataclass(frozen=True, slots=True)
class AlignedToken:
    """A token that belongs to consecutive positions.

    Attributes:
        logprob: highest log-probability among its positions.
        first, last: positions; `last` is not included.
    """

    token: int
    logprob: float
    first: int
    last: int


@dataclass(slots=True)
class AlignedWord:
    """A word of several tokens.

    Attributes:
        first, last: indices of its tokens; `last` is not included.
        start, end: in seconds from the start of the window.
    """

    content: bytes
    first: int
    last: int
    start: float
    end: float

    @property
    def text(self) -> str:
        """Its characters."""
        return self.content.decode(errors="replace").strip()


def align_words(
    tokens: Sequence[AlignedToken],
    contents: Sequence[bytes],
    seconds_per_position: float,
    seconds: float,
    *,
    spaced: bool = True,
) -> list[AlignedWord]:
    """The words of a window: what stands between white space.

    Args:
        tokens: of the window.
        contents: the bytes of each.
        seconds_per_position: time between positions.
        seconds: length of the window, which no time exceeds.
        spaced: False: the vocabulary has no white space, and each token is a word.
    """
    words: list[AlignedWord] = []
    begins = True
    for index, (token, content) in enumerate(zip(tokens, contents, strict=True)):
        begins = begins or content[:1].isspace() or not spaced
        if content.strip():
            start, end = (min(at * seconds_per_position, seconds) for at in (token.first, token.last))
            if begins:
                words.append(AlignedWord(content, index, index + 1, start, end))
            else:
                word = words[-1]
                word.content, word.last, word.end = word.content + content, index + 1, end
            begins = content[-1:].isspace()
    return words


def timed_words(words: Sequence[AlignedWord], offset: float) -> list[tuple[int, Word]]:
    """Words as a transcription gives them, with the index of the token that each begins with.

    `offset`: seconds before the window.
    """
    return [(word.first, Word(word.text, offset + word.start, offset + word.end)) for word in words]


def segment_words(words: Sequence[AlignedWord], tokens: Sequence[AlignedToken]) -> list[SegmentSpan]:
    """Segments that end where a pause follows, and before they become too long to be shown at once."""
    return [
        SegmentSpan(
            group[0].start,
            group[-1].end,
            group[0].first,
            group[-1].last,
            tuple(token.token for token in tokens[group[0].first : group[-1].last]),
        )
        for group in _grouped(words)
    ]


def _grouped(words: Sequence[AlignedWord]) -> Iterator[Sequence[AlignedWord]]:
    begin = 0
    for index in range(1, len(words) + 1):
        if (
            index == len(words)
            or words[index].start - words[index - 1].end >= _PAUSE
            or words[index].end - words[begin].start > _LONGEST
        ):
            yield words[begin:index]
            begin = index

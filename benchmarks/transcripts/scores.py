"""Scores of a transcript: word errors, and errors of the times of cues and words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.transcripts.recordings import Sentence

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_SPELLED = {str(number): word for number, word in enumerate(_NUMBERS)} | {"mr": "mister", "mrs": "missus"}


@dataclass(frozen=True, slots=True)
class Timed:
    """A cue or a word, with its seconds."""

    text: str
    start: float
    end: float


@dataclass(slots=True)
class TimeErrors:
    """Errors of times.

    Attributes:
        count: cues or words.
        worst: greatest error in seconds.
        wrong: those with an error of more than the tolerance, with the error.
        spanning: those that hold several sentences with a pause between them.
    """

    count: int = 0
    worst: float = 0.0
    wrong: list[tuple[float, Timed]] = field(default_factory=list)
    spanning: int = 0


def spoken_words(text: str) -> list[str]:
    """Return the words of a text as they are spoken: no punctuation, no capitals, numbers as words."""
    words: list[str] = []
    for word in re.sub(r"[^\w\s']", " ", text.lower()).split():
        if word.isdigit() and word != "10":
            words += [_SPELLED[digit] for digit in word]
        else:
            words.append("ten" if word == "10" else _SPELLED.get(word, word))
    return words


def word_errors(sentences: Sequence[Sentence], text: str) -> tuple[int, int]:
    """Return the words that were substituted, left out or put in, and the words that were said."""
    said = [word for sentence in sentences for word in spoken_words(sentence.text)]
    heard = spoken_words(text)
    return _costs(said, heard)[-1][-1], len(said)


def time_errors(sentences: Sequence[Sentence], timed: Sequence[Timed], tolerance: float, pause: float) -> TimeErrors:
    """Return how far cues or words are from the sentences that they belong to.

    What begins with the first word of a sentence has to begin when its speech does, and what ends with the last one has
    to end with it; other times have to lie within the sentence.

    Args:
        sentences: what was said, and when.
        timed: cues or words, in order.
        tolerance: seconds by which a time may be wrong.
        pause: seconds between two sentences, from which on they should not share a cue.
    """
    places = [(index, place) for index, sentence in enumerate(sentences) for place in _places(sentence)]
    said = [word for sentence in sentences for word in spoken_words(sentence.text)]
    owners = [(number, word) for number, segment in enumerate(timed) for word in spoken_words(segment.text)]
    matches: dict[int, list[int]] = {}
    for at, other in _matched(said, [word for _, word in owners]):
        matches.setdefault(owners[other][0], []).append(at)
    errors = TimeErrors(count=len(timed))
    for number, segment in enumerate(timed):
        if number not in matches:
            continue
        (first, begins), (last, ends) = places[matches[number][0]], places[matches[number][-1]]
        # A first word that was misheard still begins its sentence.
        error = max(
            _error(segment.start, sentences[first], sentences[first].start if begins[0] else None),
            _error(segment.end, sentences[last], sentences[last].end if ends[1] else None),
        )
        errors.worst = max(errors.worst, error)
        if error > tolerance:
            errors.wrong.append((error, segment))
        between = zip(sentences[first:last], sentences[first + 1 : last + 1], strict=True)
        errors.spanning += any(later.start - earlier.end >= pause for earlier, later in between)
    return errors


def _places(sentence: Sentence) -> list[tuple[bool, bool]]:
    """Whether each word is the first one and the last one of its sentence."""
    count = len(spoken_words(sentence.text))
    return [(index == 0, index == count - 1) for index in range(count)]


def _error(time: float, sentence: Sentence, exact: float | None) -> float:
    if exact is not None:
        return abs(time - exact)
    return max(0.0, sentence.start - time, time - sentence.end)


def _costs(said: Sequence[str], heard: Sequence[str]) -> list[list[int]]:
    """The edit distance of each beginning of what was said from each beginning of what was heard."""
    rows = [list(range(len(heard) + 1))]
    for index, word in enumerate(said, 1):
        above, row = rows[-1], [index]
        for at, other in enumerate(heard, 1):
            row.append(min(above[at] + 1, row[-1] + 1, above[at - 1] + (word != other)))
        rows.append(row)
    return rows


def _matched(said: Sequence[str], heard: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of indices of words that were heard as they were said, in order."""
    rows = _costs(said, heard)
    pairs, at, other = list[tuple[int, int]](), len(said), len(heard)
    while at and other:
        if said[at - 1] == heard[other - 1] and rows[at][other] == rows[at - 1][other - 1]:
            pairs.append((at - 1, other - 1))
            at, other = at - 1, other - 1
        elif rows[at][other] == rows[at - 1][other - 1] + 1:
            at, other = at - 1, other - 1
        elif rows[at][other] == rows[at - 1][other] + 1:
            at -= 1
        else:
            other -= 1
    return pairs[::-1]

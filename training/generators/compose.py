"""Phrases for training put together from frames, contents and synonyms; none is one of the evaluation's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from training.books import phrase_book
from training.grammar import SLOT, all_phrases, draw, normal, tidy

Words = Mapping[str, Sequence[str]]

BOOKS = ("quire", "fallback", "small_talk", "arithmetic")
# What a slot of a held-out phrase may stand for when a composed one is compared with it.
FILLING = r"\S+(?: \S+){0,4}"
MOST_TRIES = 100


def expand(pattern: str, words: Words, rng: Random) -> str:
    """A phrase of the pattern with every slot that ``words`` knows filled, again and again; other slots stay."""
    text = SLOT.sub(lambda match: _word(match, words, rng), draw(pattern, rng))
    return _article(tidy(text))


def _word(match: re.Match[str], words: Words, rng: Random) -> str:
    return expand(rng.choice(words[match[1]]), words, rng) if match[1] in words else match[0]


def _article(text: str) -> str:
    """a or an, before lower-case words that are not drawn together with it."""
    text = re.sub(r"\b([Aa])n (?=[bcdfgjklmnpqrstvwxz][a-z])", r"\1 ", text)
    return re.sub(r"\b([Aa]) (?=[aeio][a-z])(?!one\b|eu)", r"\1n ", text)


def _heldout_lists(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _heldout_lists(value)
        elif name == "heldout":
            for pattern in value:
                yield from all_phrases(pattern)


@cache
def _heldout(book: str) -> tuple[frozenset[str], re.Pattern[str]]:
    phrases = frozenset(normal(phrase) for phrase in _heldout_lists(phrase_book(book)))
    slotted = [phrase for phrase in sorted(phrases) if SLOT.search(phrase)]
    patterns = [FILLING.join(re.escape(part) for part in re.split(r"\{\w+\}", phrase)) for phrase in slotted]
    return phrases, re.compile("|".join(patterns) if patterns else r"(?!)")


def is_heldout_phrase(phrase: str, book: str) -> bool:
    """Whether the phrase is one of the book's held-out ones, whatever fills their slots."""
    phrases, patterns = _heldout(book)
    text = normal(phrase)
    return text in phrases or patterns.fullmatch(text) is not None


def fresh(make: Callable[[], str], book: str) -> str:
    """A phrase of ``make`` that the evaluation does not use."""
    for _ in range(MOST_TRIES):
        phrase = make()
        if not is_heldout_phrase(phrase, book):
            return phrase
    raise ValueError(f"only held-out phrases of {book}")

"""Putting phrases together from parts: a pattern may hold ``<list>``, one of the phrases of another list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from random import Random

from training.books import phrase_book
from training.grammar import all_phrases, draw, normal

PART = re.compile(r"<(\w+)>")


def part(book: str, name: str, rng: Random) -> str:
    """A phrase of a list of ``phrases/BOOK.toml``, its parts filled in; slots stay."""
    return expand(book, rng.choice(phrase_book(book)[name]), rng)


def expand(book: str, pattern: str, rng: Random) -> str:
    """One phrase of the pattern."""
    table = phrase_book(book)
    text = draw(pattern, rng)
    if "<" not in text:
        return text
    return PART.sub(lambda found: part(book, found[1], rng) if found[1] in table else found[0], text)


@cache
def normal_phrases(patterns: tuple[str, ...]) -> frozenset[str]:
    """All phrases of the patterns, in normal form."""
    return frozenset(normal(phrase) for pattern in patterns for phrase in all_phrases(pattern))


def is_one_of(phrase: str, patterns: Iterable[str]) -> bool:
    """Whether the phrase is one of those that the patterns stand for."""
    return normal(phrase) in normal_phrases(tuple(patterns))

"""Phrases composed of parts: ``<list>`` in a pattern stands for a phrase of another list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from random import Random

from training.books import phrase_book
from training.grammar import all_phrases, draw, normalize

PART = re.compile(r"<(\w+)>")


def part(book: str, name: str, rng: Random) -> str:
    """Draw a phrase of a list of ``phrases/BOOK.toml`` and fill in its parts; slots stay."""
    return expand(book, rng.choice(phrase_book(book)[name]), rng)


def expand(book: str, pattern: str, rng: Random) -> str:
    """Draw a phrase of the pattern and fill in its parts."""
    table = phrase_book(book)
    text = draw(pattern, rng)
    if "<" not in text:
        return text
    return PART.sub(lambda match: part(book, match[1], rng) if match[1] in table else match[0], text)


@cache
def normalized_phrases(patterns: tuple[str, ...]) -> frozenset[str]:
    """Return all phrases of the patterns, normalized."""
    return frozenset(normalize(phrase) for pattern in patterns for phrase in all_phrases(pattern))


def is_one_of(phrase: str, patterns: Iterable[str]) -> bool:
    """Whether the phrase matches one of the patterns."""
    return normalize(phrase) in normalized_phrases(tuple(patterns))

"""Phrases for training, composed of templates, contents and synonyms. Held-out phrases are excluded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from training.books import phrase_book
from training.grammar import SLOT, all_phrases, draw, normalize, tidy

Words = Mapping[str, Sequence[str]]

BOOKS = ("quire", "fallback", "small_talk", "arithmetic")
# Texts that a slot of a held-out phrase matches when it is compared with a composed phrase.
SLOT_FILLER = r"\S+(?: \S+){0,4}"
MAX_TRIES = 100


def expand(pattern: str, words: Words, rng: Random) -> str:
    """Draw a phrase of the pattern and fill the slots found in ``words``, recursively; other slots stay."""
    text = SLOT.sub(lambda match: _fill_slot(match, words, rng), draw(pattern, rng))
    return _fix_articles(tidy(text))


def _fill_slot(match: re.Match[str], words: Words, rng: Random) -> str:
    return expand(rng.choice(words[match[1]]), words, rng) if match[1] in words else match[0]


def _fix_articles(text: str) -> str:
    """Correct "a" and "an" before lower-case words that were filled in separately."""
    text = re.sub(r"\b([Aa])n (?=[bcdfgjklmnpqrstvwxz][a-z])", r"\1 ", text)
    return re.sub(r"\b([Aa]) (?=[aeio][a-z])(?!one\b|eu)", r"\1n ", text)


def _heldout_phrases(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _heldout_phrases(value)
        elif name == "heldout":
            for pattern in value:
                yield from all_phrases(pattern)


@cache
def _heldout_matchers(book: str) -> tuple[frozenset[str], re.Pattern[str]]:
    phrases = frozenset(normalize(phrase) for phrase in _heldout_phrases(phrase_book(book)))
    slotted = [phrase for phrase in sorted(phrases) if SLOT.search(phrase)]
    patterns = [SLOT_FILLER.join(re.escape(part) for part in re.split(r"\{\w+\}", phrase)) for phrase in slotted]
    return phrases, re.compile("|".join(patterns) if patterns else r"(?!)")


def is_heldout_phrase(phrase: str, book: str) -> bool:
    """Whether the phrase is a held-out phrase of the book, with any values in its slots."""
    phrases, patterns = _heldout_matchers(book)
    text = normalize(phrase)
    return text in phrases or patterns.fullmatch(text) is not None


def draw_not_heldout(make: Callable[[], str], book: str) -> str:
    """Call ``make`` until it returns a phrase that the evaluation does not use."""
    for _ in range(MAX_TRIES):
        phrase = make()
        if not is_heldout_phrase(phrase, book):
            return phrase
    raise ValueError(f"only held-out phrases of {book}")

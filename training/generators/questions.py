"""Questions on Quire for training: a content phrase filled into a question template."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.compose import expand

# Sampling weights of the kinds of content that a fact may have.
WEIGHTS = {"do": 5, "set": 3, "thing": 2, "have": 1.5, "know": 3, "ask": 4, "key": 2, "say": 3.5, "name": 2}
CONTEXT_RATE = 0.06
AFTER_RATE = 0.03


@cache
def question_contents(fact: str, flag: str | None) -> dict[str, list[str]]:
    """Return the contents of a fact by kind."""
    table = phrase_book("wants").get(fact) or phrase_book("wants_more")[fact]
    return {**table, **({"name": [flag]} if flag else {})}


def composed_question(fact: str, flag: str | None, rng: Random) -> str:
    """Compose a question on the fact."""
    contents = question_contents(fact, flag)
    kinds = list(contents)
    kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    content = rng.choice(contents[kind])
    book = phrase_book("frames")
    phrase = _expand(rng.choice(_templates(kind, flag)), {_slot(kind): [content]}, book, rng)
    chance = rng.random()
    if chance < CONTEXT_RATE:
        return f"{_expand(rng.choice(book['contexts']['train']), {}, book, rng)} {phrase}"
    if chance < CONTEXT_RATE + AFTER_RATE and ". " not in phrase:
        return f"{phrase}{rng.choice('.?')} {rng.choice(book['contexts']['after'])}"
    return phrase


def _templates(kind: str, flag: str | None) -> list[str]:
    templates: dict[str, list[str]] = phrase_book("frames")["frames"]
    if kind == "name":
        return templates["name"] + templates["flag" if flag else "path"]
    return templates[kind]


def _slot(kind: str) -> str:
    return "x" if kind == "set" else kind


def _expand(pattern: str, content: dict[str, list[str]], book: dict[str, Any], rng: Random) -> str:
    return expand(pattern, {**book["words"], **content}, rng)

"""Phrase patterns with alternatives: ``(what is|what's) {a} plus {b}`` is two phrases with two slots.

A group in parentheses is a choice only if it has a ``|`` of its own; other parentheses are text. Groups may nest.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from random import Random

Node = str | tuple["Sequence", ...]
Sequence = tuple[Node, ...]

SLOT = re.compile(r"\{(\w+)\}")


@cache
def parse(pattern: str) -> Sequence:
    """Parse the pattern into a sequence of plain strings and choices."""
    sequence, end = _parse_alternatives(pattern, 0)
    if end != len(pattern):
        raise ValueError(f"unbalanced parenthesis in {pattern!r}")
    return sequence[0] if len(sequence) == 1 else (sequence,)


def _parse_alternatives(text: str, start: int) -> tuple[tuple[Sequence, ...], int]:
    alternatives: list[Sequence] = []
    current: list[Node] = []
    plain: list[str] = []
    at = start

    def flush() -> None:
        if plain:
            current.append("".join(plain))
            plain.clear()

    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            group, close = _parse_alternatives(text, at + 1)
            if close >= len(text):
                raise ValueError(f"unbalanced parenthesis in {text!r}")
            flush()
            current.extend([group] if len(group) > 1 else ["(", *group[0], ")"])
            at = close + 1
        elif text[at] == "|" and start > 0:
            flush()
            alternatives.append(tuple(current))
            current = []
            at += 1
        else:
            plain.append(text[at])
            at += 1
    flush()
    alternatives.append(tuple(current))
    return tuple(alternatives), at


def draw(pattern: str, rng: Random) -> str:
    """Draw one of the phrases of the pattern."""
    return tidy(_draw(parse(pattern), rng))


def tidy(text: str) -> str:
    """Replace multiple spaces, which empty alternatives leave, by single ones."""
    return re.sub(" {2,}", " ", text).strip()


def normalize(phrase: str) -> str:
    """Return the phrase in lower case without punctuation, for comparison."""
    return re.sub(r"[^\w{}+*/=-]+", " ", phrase.lower()).strip()


def _draw(sequence: Sequence, rng: Random) -> str:
    return "".join(node if isinstance(node, str) else _draw(rng.choice(node), rng) for node in sequence)


def all_phrases(pattern: str) -> list[str]:
    """Return every phrase of the pattern."""
    return [tidy(text) for text in _all(parse(pattern))]


def _all(sequence: Sequence) -> list[str]:
    choices = [[node] if isinstance(node, str) else [t for option in node for t in _all(option)] for node in sequence]
    return ["".join(parts) for parts in product(*choices)]


def slots_of(phrase: str) -> list[str]:
    """Return the names of the slots in order of appearance."""
    return SLOT.findall(phrase)


def fill(phrase: str, values: dict[str, str]) -> str:
    """Fill the slots of the phrase; slots without a value stay."""
    return SLOT.sub(lambda match: values.get(match[1], match[0]), phrase)

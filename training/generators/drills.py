"""Copying and looking up: the skills under recall, extraction and tool calls."""

from __future__ import annotations

from random import Random

from training.books import phrase_book
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import disturb
from training.values import Values

COPIED = (
    "sentence", "sentence", "query", "full_name", "email", "code", "handle", "path", "url", "task", "rare_name",
    "city", "digits", "address",
)  # fmt: skip
LOOKED_UP = ("first_names", "cities", "code", "handle", "rare_word", "int 1 99", "thing", "digits")


def repeat_turn(rng: Random, values: Values, split: str = "train") -> Turn:
    """Text to repeat."""
    count = rng.choice((1, 1, 1, 2, 3))
    text = ", ".join(str(values.draw(rng.choice(COPIED), rng)) for _ in range(count))
    phrase = disturb(rng.choice(phrase_book("drills")["repeat"][split]), rng, split, end=False)
    return Turn("repeat", fill(phrase, {"x": text}), text, expect={"text": text})


def echo_text(rng: Random, values: Values) -> str:
    """Words without sense, to be copied as they are."""
    return " ".join(str(values.draw(rng.choice(COPIED + LOOKED_UP), rng)) for _ in range(rng.randint(4, 12)))


def lookup_turns(rng: Random, values: Values, split: str = "train") -> list[Turn]:
    """A list of keys and values, and questions on them."""
    book = phrase_book("drills")
    kind = rng.choice(LOOKED_UP)
    keys = list(dict.fromkeys(str(values.draw("rare_word", rng)) for _ in range(rng.randint(2, 6))))
    pairs = {key: str(values.draw(kind, rng)) for key in keys}
    sign = rng.choice((" = ", ": ", " is "))
    listed = ", ".join(f"{key}{sign}{value}" for key, value in pairs.items())
    turns = []
    for at, key in enumerate(rng.sample(keys, len(keys))):
        question = disturb(draw(rng.choice(book["lookup"][split]), rng), rng, split, frame=False)
        if at == 0:
            question = fill(rng.choice(book["lists"][split]), {"q": question, "l": listed})
        turns.append(Turn("lookup", fill(question, {"k": key}), f"{pairs[key]}", expect={"text": pairs[key]}))
    return turns

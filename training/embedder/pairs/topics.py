"""Everyday topics: questions with the texts that answer them, and with other questions on the topic."""

from __future__ import annotations

from functools import cache
from random import Random

from training.books import phrase_book
from training.embedder.pairs.pair import Pair, same
from training.grammar import draw
from training.noise import add_noise

HELDOUT_EVERY = 5


@cache
def topics(split: str) -> dict[str, dict[str, list[str]]]:
    """Return the topics of training, or those that only the evaluation uses."""
    table = phrase_book("topics")["topics"]
    heldout = list(table)[HELDOUT_EVERY - 1 :: HELDOUT_EVERY]
    return {name: topic for name, topic in table.items() if (name in heldout) == (split == "heldout")}


def topic_pair(rng: Random, split: str) -> Pair:
    """Return a question, or a short form of it, and a text or another question on the same topic."""
    name = rng.choice(list(topics(split)))
    topic = topics(split)[name]
    first, second = rng.choice(
        (("ask", "text"), ("ask", "text"), ("short", "text"), ("ask", "ask"), ("short", "ask"), ("text", "text"))
    )
    query, text = _draw(topic, first, rng, split), _draw(topic, second, rng, split)
    while query.lower() == text.lower():
        text = _draw(topic, "text", rng, split)
    return same(query, text, [f"topic {name}"])


def _draw(topic: dict[str, list[str]], part: str, rng: Random, split: str) -> str:
    phrase = draw(rng.choice(topic[part]), rng)
    return add_noise(phrase, rng, split) if part == "ask" else phrase

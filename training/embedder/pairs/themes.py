"""All kinds of pairs, by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.embedder.pairs.classes import word_class
from training.embedder.pairs.docs import docs_pair
from training.embedder.pairs.facts import recall_question, recall_wording
from training.embedder.pairs.pair import Pair
from training.embedder.pairs.quire import quire_answer, quire_question, small_talk
from training.embedder.pairs.records import record_question, record_short, record_wording
from training.embedder.pairs.tools import tool_request, tool_wording
from training.embedder.pairs.topics import topic_pair
from training.embedder.pairs.wording import arithmetic, keywords, other_words, typo

THEMES: dict[str, Callable[[Random, str], Pair]] = {
    "quire_answer": quire_answer, "quire_question": quire_question, "small_talk": small_talk,
    "tool_request": tool_request, "tool_wording": tool_wording, "recall_question": recall_question,
    "recall_wording": recall_wording, "record_question": record_question, "record_wording": record_wording,
    "record_short": record_short, "arithmetic": arithmetic, "typo": typo, "other_words": other_words,
    "keywords": keywords, "topics": topic_pair, "docs": docs_pair, "word_class": word_class,
}  # fmt: skip


def make_pair(theme: str, rng: Random, split: str = "train") -> Pair:
    """Return a pair of a theme."""
    return THEMES[theme](rng, split)

"""Questions on Quire with their answers, questions that ask the same, and small talk."""

from __future__ import annotations

from functools import cache
from random import Random

from training.embedder.pairs.pair import Pair, same
from training.generators.knowledge import facts, quire_turn, small_talk_turn

# Every tenth fact on Quire is left out of training, so that the evaluation has questions on new facts.
HELDOUT_EVERY = 10
FIRST_HELDOUT = 4
MAX_TRIES = 50


@cache
def heldout_facts() -> tuple[str, ...]:
    """Return the ids of the facts on which training has no question and no answer."""
    return tuple(list(facts())[FIRST_HELDOUT::HELDOUT_EVERY])


@cache
def training_facts() -> tuple[str, ...]:
    """Return the ids of the other facts."""
    return tuple(fact for fact in facts() if fact not in heldout_facts())


def answer_of(fact: str) -> str:
    """Return the answer to a question on the fact."""
    return str(facts()[fact]["answer"])


def quire_answer(rng: Random, split: str) -> Pair:
    """Return a question on Quire and its answer."""
    fact = rng.choice(training_facts())
    return same(quire_turn(rng, split, fact).user, answer_of(fact), [f"quire {fact}"])


def quire_question(rng: Random, split: str) -> Pair:
    """Return two questions on the same fact."""
    fact = rng.choice(training_facts())
    first = quire_turn(rng, split, fact).user
    return same(first, _another(first, lambda: quire_turn(rng, split, fact).user), [f"quire {fact}"])


def small_talk(rng: Random, split: str) -> Pair:
    """Return two greetings, thanks or the like of one sort, or one with its reply."""
    turn = small_talk_turn(rng, split)
    # The reply stands for the topic, which the turn does not name.
    if rng.random() < 0.4:
        return same(turn.user, turn.reply, [turn.reply])
    for _ in range(MAX_TRIES * 10):
        other = small_talk_turn(rng, split)
        if other.reply == turn.reply and other.user.lower() != turn.user.lower():
            return same(turn.user, other.user, [turn.reply])
    return same(turn.user, turn.reply, [turn.reply])


def _another(first: str, make: object) -> str:
    assert callable(make)
    text = first
    for _ in range(MAX_TRIES):
        text = str(make())
        if text.lower() != first.lower():
            break
    return text

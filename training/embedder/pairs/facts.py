"""Facts that a user states, with questions for them and with the same facts in other words."""

from __future__ import annotations

from random import Random

from training.embedder.pairs.pair import Pair, same
from training.generators.recall import SIMILAR_FACTS, Fact, Memory
from training.values import Values

VALUES = {split: Values(split) for split in ("train", "heldout")}
MAX_TRIES = 30


def recall_question(rng: Random, split: str) -> Pair:
    """Return a question for a fact and its statement; the wrong text is the statement of another fact."""
    memory, fact, statement = _told(rng, split)
    negative = ""
    if rng.random() < 0.5:
        other = memory.tell()
        later = list(memory.told.values())[-1]
        negative = other.user if _topic(later) != _topic(fact) else ""
        memory.told = {fact.key: fact}
    return same(_question(memory), statement, [_topic(fact)], negative)


def recall_wording(rng: Random, split: str) -> Pair:
    """Return a statement and a note of the same fact; the wrong text is a note with another value."""
    _, fact, statement = _told(rng, split)
    note = fact.statement()
    other = str(VALUES[split].draw("rare_name", rng))
    kind = rng.random()
    for _ in range(MAX_TRIES):
        _, changed, _ = _told(rng, split)
        if kind < 0.5 and _kind(changed) == _kind(fact) and changed.value != fact.value:
            other = changed.value
            break
    negative = note.replace(fact.value, other) if fact.value in note else ""
    return same(statement, note, [_topic(fact), f"value {fact.value}"], negative if negative != note else "")


def _told(rng: Random, split: str) -> tuple[Memory, Fact, str]:
    memory = Memory(rng, VALUES[split], split)
    turn = memory.tell()
    return memory, next(iter(memory.told.values())), turn.user


def _question(memory: Memory) -> str:
    while True:
        turn = memory.ask()
        if "value" in turn.expect:
            return turn.user


def _kind(fact: Fact) -> str:
    return fact.key.split(".")[1]


def _topic(fact: Fact) -> str:
    """Return what the fact is about; similar facts, for which one question may ask, have the same topic."""
    group, _, subkey = fact.key.partition(".")
    name, _, person = subkey.partition(".")
    for similar in SIMILAR_FACTS:
        if name in similar:
            name = min(similar)
            break
    return f"recall {name} {fact.slots.get('p', person)}" if group in ("others", "people") else f"recall {name}"

"""Texts about people and things with questions, with the same facts in other words, and with short forms."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from training.books import phrase_book
from training.embedder.pairs.pair import Pair
from training.generators.recall import with_article
from training.generators.records import MAKERS, ORDINARY_KINDS, Record, make_record, person_record, thing_record
from training.grammar import all_phrases, draw, fill, slots_of
from training.noise import add_noise
from training.values import Values

VALUES = {split: Values(split) for split in ("train", "heldout")}
LISTS = ("languages", "hobbies")
MAX_TRIES = 40
# Facts that say little about which text is meant
VAGUE = (
    "age", "kids", "children", "married", "student", "employed", "vegetarian", "car_owner", "first_name", "last_name",
    "sentiment", "stock", "urgency", "stars", "day", "quantity",
)  # fmt: skip


def record_question(rng: Random, split: str) -> Pair:
    """Return a question and the text that answers it; the wrong text has another name in place of the one asked for."""
    book = phrase_book("pairs")["questions"]
    while True:
        about, asked = rng.choice(_question_keys())
        record = (
            person_record(rng, VALUES[split], *_wanted(asked))
            if about == "person"
            else thing_record(rng, VALUES[split], about)
        )
        pattern = draw(rng.choice(book[about][asked][split]), rng)
        slots = slots_of(pattern)
        shown = {
            "ajob": with_article(str(record.facts.get("job"))),
            **{key: str(value) for key, value in record.facts.items()},
        }
        if asked in record.facts and all(slot in shown for slot in slots):
            query = fill(add_noise(pattern, rng, split, frame=rng.random() < 0.5), shown)
            marks = frozenset(
                _mark("job" if slot == "ajob" else slot, shown["job" if slot == "ajob" else slot]) for slot in slots
            )
            return Pair(query, record.text, marks, _marks(record.facts), _changed(record, slots, rng, split))


def _wanted(asked: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the facts to add to the text of a person, and the facts of its first sentence."""
    if asked in phrase_book("records")["more"]:
        return (asked,), ()
    return (), (() if asked == "name" else (asked,))


@cache
def _question_keys() -> list[tuple[str, str]]:
    book = phrase_book("pairs")["questions"]
    return [(about, asked) for about, table in book.items() for asked in table]


def _changed(record: Record, slots: list[str], rng: Random, split: str) -> str:
    """Return the text with another value of one of the slots."""
    slot = rng.choice(slots)
    slot = "job" if slot == "ajob" else slot
    value = str(record.facts[slot])
    other = str(_value(slot, rng, VALUES[split]))
    return record.text.replace(value, other) if value in record.text and value != other else ""


def record_wording(rng: Random, split: str) -> Pair:
    """Return two texts with the same facts, or the first with fewer; the wrong text differs in one of them."""
    about, (first, second) = _two_patterns(rng, split)
    shown = {slot: _shown(slot, rng, VALUES[split]) for slot in sorted(set(slots_of(first) + slots_of(second)))}
    asked = [slot for slot in slots_of(first) if slot not in VAGUE] or slots_of(first)
    slot = rng.choice(asked)
    negative = fill(second, {**shown, slot: _shown(slot, rng, VALUES[split])})
    text = fill(second, shown)
    asks, holds = (
        frozenset(f"{about} {_mark(slot, shown[slot])}" for slot in slots_of(pattern)) for pattern in (first, second)
    )
    return Pair(fill(first, shown), text, asks, holds, negative if negative != text else "")


def _two_patterns(rng: Random, split: str) -> tuple[str, tuple[str, str]]:
    book = phrase_book("records")
    while True:
        about = "person" if rng.random() < 0.4 else rng.choice(list(book["things"]))
        patterns = book["base"][split] if about == "person" else book["things"][about][split]
        first, second = (draw(rng.choice(patterns), rng) for _ in range(2))
        slots = set(slots_of(first))
        enough = len(slots) > 1 or not slots <= {*VAGUE}
        if (
            first != second
            and slots
            and slots <= set(slots_of(second))
            and enough
            and len(slots_of(first)) == len(slots)
        ):
            return about, (first, second)


def record_short(rng: Random, split: str) -> Pair:
    """Return some facts of a text as JSON, list or keywords, and the text; the wrong text differs in one of them."""
    for _ in range(MAX_TRIES):
        record = make_record(rng, VALUES[split])
        facts = {key: value for key, value in record.facts.items() if key not in ("first_name", "last_name")}
        named = [key for key in facts if key not in VAGUE]
        if len(facts) > 1 and named:
            break
    chosen = rng.sample(sorted(facts), rng.randint(2, min(4, len(facts))))
    if named and not set(chosen) & set(named):
        chosen[0] = rng.choice(named)
    part = {key: facts[key] for key in dict.fromkeys(chosen)}
    marks = frozenset(_mark(key, value) for key, value in part.items())
    plain = [key for key, value in part.items() if key not in VAGUE and not isinstance(value, list | bool)]
    negative = _changed(record, plain, rng, split) if plain else ""
    return Pair(_short(part, rng), record.text, marks, _marks(record.facts), negative)


def _short(part: dict[str, Any], rng: Random) -> str:
    form = rng.randrange(5)
    plain = {key: ", ".join(value) if isinstance(value, list) else str(value) for key, value in part.items()}
    if form == 0:
        return json.dumps(part, ensure_ascii=False)
    if form == 1:
        return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in plain.items())
    if form == 2:
        return "\n".join(f"{key.replace('_', ' ').capitalize()}: {value}" for key, value in plain.items())
    told = [key.replace("_", " ") if value in ("True", "False") else value for key, value in plain.items()]
    return (", " if form == 3 else " ").join(told)


def _mark(slot: str, value: Any) -> str:
    return f"{slot} {value}".lower()


def _marks(facts: dict[str, Any]) -> frozenset[str]:
    return frozenset(_mark(slot, value) for slot, value in facts.items())


def _value(slot: str, rng: Random, values: Values) -> Any:
    maker = MAKERS.get(slot)
    kind = {"job": "job", "capital": "cities"}.get(slot, ORDINARY_KINDS.get(slot, slot))
    return maker(rng, values) if maker else values.draw(kind, rng)


def _shown(slot: str, rng: Random, values: Values) -> str:
    """Draw the text of a slot."""
    book = phrase_book("records")
    if slot == "ajob":
        return with_article(str(values.draw("job", rng)))
    if slot == "people" or slot in LISTS:
        kind = "first_names" if slot == "people" else slot
        return " and ".join(str(values.draw(kind, rng)) for _ in range(2))
    if slot in book["options"]:
        return str(rng.choice([text for texts in book["options"][slot].values() for text in texts]))
    return str(_value(slot, rng, values))


def heldout_questions() -> set[str]:
    """Return the questions that only the evaluation uses."""
    tables = phrase_book("pairs")["questions"].values()
    return {
        phrase
        for table in tables
        for lists in table.values()
        for pattern in lists["heldout"]
        for phrase in all_phrases(pattern)
    }

"""Texts about a person or a thing, and the facts in them, for answers with schemas of any kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.extract import composed_text
from training.generators.recall import with_article
from training.generators.sentences import INFLECTION, PERSONS
from training.grammar import SLOT, draw, slots_of
from training.values import Values

BOOK = "records"
PERSON = "person"
PERSON_RATE = 0.68
# Share of training texts from the generator of plain extraction; their facts never clash with these additions.
COMPOSED_RATE = 0.4
COMPOSED_SECTIONS = ("name_age_city", "name_age_city", "name_age", "name_city", "name_only")
SAFE_ADDITIONS = ("email", "phone", "kids", "married", "vegetarian")
TWO_NAMES_RATE = 0.45
# Facts that exclude each other in a text.
CLASHES = {"job": "employed", "company": "employed", "employed": "job", "kids": "children", "children": "kids"}
FIRST_PERSON = re.compile(r"\b(I am|I'm|im|my name|friends call me|people call me|i'm|name's)\b", re.IGNORECASE)
FEMALE = re.compile(r"\b(she|her|woman|girl|sister|aunt|Mrs|Ms)\b", re.IGNORECASE)
ORDINARY_KINDS = {
    "pet_name": "pet_names", "product": "noun", "author": "full_name", "owner": "full_or_first_name",
    "hobby": "hobbies", "car_type": "cars", "day": "weekdays", "month": "months", "weekday": "weekdays",
    "year": "int 1950 2025", "year0": "int 1980 2024", "quantity": "int 2 60", "number": "int 1 199",
    "temperature": "int 1 38", "stars": "int 1 5", "kids": "int 1 6", "age": "int 1 99", "city": "cities",
    "name": "full_or_first_name",
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A text and its facts by field; ``about`` is "person" or a table of ``things``."""

    about: str
    text: str
    facts: dict[str, Any]


def make_record(rng: Random, values: Values, about: str | None = None) -> Record:
    """Return a text about a person or a thing."""
    if about is None:
        about = PERSON if rng.random() < PERSON_RATE else rng.choice(list(phrase_book(BOOK)["things"]))
    return person_record(rng, values) if about == PERSON else thing_record(rng, values, about)


def person_record(rng: Random, values: Values, added: tuple[str, ...] = (), base: tuple[str, ...] = ()) -> Record:
    """Return a text about a person. ``added``: facts to add; ``base``: facts that its first sentence has."""
    if values.split == "train" and not added and rng.random() < COMPOSED_RATE:
        text, person = composed_text(rng.choice(COMPOSED_SECTIONS), rng, values)
        facts = {key: value for key, value in person.items() if value is not None}
        additions: tuple[str, ...] = SAFE_ADDITIONS
    else:
        text, facts = _base(rng, values, base)
        book = phrase_book(BOOK)
        additions = (*book["more"], *book["yes"])
    text = text if text[-1:] in '.!?"' else text + "."
    person_of = "I" if FIRST_PERSON.search(text) else "she" if FEMALE.search(text) else rng.choice(("he", "she"))
    chosen = list(added) or rng.sample(additions, rng.choice((0, 0, 1, 1, 2, 3)))
    for field in chosen:
        if CLASHES.get(field) not in facts:
            sentence, facts[field] = _addition(field, person_of, rng, values)
            text += " " + sentence
    return Record(PERSON, text, with_parts_of_name(facts))


def with_parts_of_name(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with first and last name, if the name has two words."""
    parts = str(facts.get("name", "")).split(" ")
    return {**facts, "first_name": parts[0], "last_name": parts[1]} if len(parts) == 2 else facts


def thing_record(rng: Random, values: Values, about: str) -> Record:
    """Return a text about a thing, such as a pet or an order."""
    pattern = draw(rng.choice(phrase_book(BOOK)["things"][about][values.split]), rng)
    facts: dict[str, Any] = {}
    text = _filled(pattern, facts, rng, values)
    if about == "nation":
        facts["capital"] = facts.pop("city")
    return Record(about, text if pattern.startswith("{") else text[:1].upper() + text[1:], with_parts_of_name(facts))


def _base(rng: Random, values: Values, needed: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    patterns = phrase_book(BOOK)["base"][values.split]
    pattern = rng.choice([pattern for pattern in patterns if {"name", *needed} <= set(slots_of(pattern))])
    facts: dict[str, Any] = {}
    text = _filled(draw(pattern, rng), facts, rng, values)
    for filler in ("food", "month", "weekday"):
        facts.pop(filler, None)
    return text, facts


def _addition(field: str, person: str, rng: Random, values: Values) -> tuple[str, Any]:
    """Return a sentence that adds a fact, and the fact."""
    book = phrase_book(BOOK)
    value: Any = None
    if field in book["yes"]:
        truth = rng.random() < 0.5
        table, value = book["yes" if truth else "no"][field], truth
    else:
        table = book["more"][field]
    facts: dict[str, Any] = {}
    pattern = draw(rng.choice(table[values.split]), rng)
    pattern = INFLECTION.sub(lambda match: PERSONS[person].get(match[1], match[0]), pattern)
    text = _filled(pattern, facts, rng, values)
    text = text if pattern.startswith("{") else text[:1].upper() + text[1:]
    return text, facts[field] if value is None else value


def _filled(pattern: str, facts: dict[str, Any], rng: Random, values: Values) -> str:
    """Fill the slots of a text and add their values to the facts."""
    return SLOT.sub(lambda match: _shown(match[1], facts, rng, values), pattern)


def _shown(slot: str, facts: dict[str, Any], rng: Random, values: Values) -> str:
    """Return a new value of a slot as it is written in the text."""
    if slot == "ajob":
        facts["job"] = values.draw("job", rng)
        return with_article(facts["job"])
    if slot == "people":
        facts["participants"] = _several("first_names", rng, values)
        return _listed(facts["participants"], rng)
    if slot in ("languages", "hobbies"):
        facts[slot] = _several(slot, rng, values)
        return _listed(facts[slot], rng)
    if slot in phrase_book(BOOK)["options"]:
        option = rng.choice(list(phrase_book(BOOK)["options"][slot]))
        facts[slot] = {"true": True, "false": False}.get(option, option)
        return str(rng.choice(phrase_book(BOOK)["options"][slot][option]))
    maker = MAKERS.get(slot)
    value = maker(rng, values) if maker else values.draw(ORDINARY_KINDS.get(slot, slot), rng)
    if slot != "year0":
        facts[slot] = value
    return str(value)


def _several(kind: str, rng: Random, values: Values) -> list[str]:
    options: list[str] = []
    while len(options) < 2 or (len(options) < 4 and rng.random() < 0.35):
        value = str(values.draw(kind, rng))
        if value not in options:
            options.append(value)
    return options


def _listed(names: list[str], rng: Random) -> str:
    return ", ".join(names[:-1]) + rng.choice((" and ", " and ", " and ", ", and ")) + names[-1]


def _name(rng: Random, values: Values) -> str:
    return str(values.draw("full_name" if rng.random() < TWO_NAMES_RATE else "first_names", rng))


def _price(rng: Random, _values: Values) -> float | int:
    return (
        rng.randint(1, 999)
        if rng.random() < 0.6
        else float(f"{rng.randint(1, 199)}.{rng.choice((5, 25, 49, 75, 95, 99))}")
    )


def _phone(rng: Random, _values: Values) -> str:
    digits = "".join(str(rng.randint(0, 9)) for _ in range(10))
    return rng.choice((
        digits[:7], f"{digits[:3]}-{digits[3:7]}", f"0{digits[:3]} {digits[3:9]}", f"+{digits[:2]} {digits[2:9]}",
        f"{digits[:3]}-{digits[3:6]}-{digits[6:]}",
    ))  # fmt: skip


def _word(name: str) -> Callable[[Random, Values], str]:
    return lambda rng, values: str(rng.choice(phrase_book(BOOK)["words"][name][values.split]))


def _company(rng: Random, values: Values) -> str:
    return f"{values.draw('surname', rng)} {_word('company')(rng, values)}"


def _day(rng: Random, values: Values) -> str:
    if rng.random() < 0.6:
        return str(values.draw("weekdays", rng))
    return f"{values.draw('months', rng)} {rng.randint(1, 28)}"


MAKERS: dict[str, Callable[[Random, Values], Any]] = {
    "name": _name, "price": _price, "phone": _phone, "company": _company, "day": _day, "event": _word("event"),
    "brand": _word("brand"), "owner": _name,
}  # fmt: skip

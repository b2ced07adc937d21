"""Extraction of name, age and city from a text, as JSON."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.arithmetic import in_words
from training.generators.parts import expand, is_one_of, part
from training.generators.recall import with_article
from training.generators.sentences import person_text, raw_part
from training.generators.turn import Turn
from training.grammar import draw, fill, slots_of, tidy
from training.noise import QUESTION, add_noise
from training.values import Values

# Some cities get a description: "in rainy Oslo".
CITY_AFTER_PREPOSITION = re.compile(r"\b(in|from|to|near|of|through|for) \{city\}")
DESCRIBED_CITIES = (
    "{adjective} {city}",
    "a {adjective} {city}",
    "the {adjective} {city}",
    "my {adjective} {city}",
    "lovely {city}",
)
KEYS = ("name", "age", "city")
SECTIONS = {
    "name_age_city": 10,
    "name_age": 3,
    "name_city": 3,
    "age_city": 1,
    "name_only": 1,
    "city_only": 1,
    "age_only": 1,
    "nothing": 0.5,
}
TRAIN_SECTIONS = {**SECTIONS, "name_age_city": 8.5, "age_city": 1.5, "name_only": 1.5, "city_only": 1.5}
SEVERAL_SECTIONS = ("name_age_city", "name_age", "name_city")
# Shares of complete texts and requests from the lists; the others are composed of parts
LISTED_TEXT_RATE = 0.1
WRITTEN_TEXT_RATE = 0.45
LISTED_REQUEST_RATE = 0.25
# Kinds of value of slots, where the names differ
KINDS = {
    "count": "int 2 9", "num": "int 100 999", "num2": "int 10 59", "year": "int 1950 2026", "day": "int 1 28",
    "pet": "pet_names", "month": "months", "weekday": "weekdays", "rarename": "rare_name", "drink": "drinks",
    "hobby": "hobbies", "instrument": "instruments", "car": "cars", "adjective": "adjectives", "noun": "nouns",
}  # fmt: skip


def extract_turn(rng: Random, values: Values, split: str = "train", several: bool = False) -> Turn:
    """Return a request to extract name, age and city from a text; with ``several``, of several people as a list."""
    book = phrase_book("extract")
    weights = TRAIN_SECTIONS if split == "train" else SECTIONS
    people: list[dict[str, Any]] = []
    texts: list[str] = []
    for _ in range(rng.randint(2, 3) if several else 1):
        sections = list(SEVERAL_SECTIONS) if several else list(SECTIONS)
        section = rng.choices(sections, [weights[name] for name in sections])[0]
        if split == "train" and rng.random() >= LISTED_TEXT_RATE:
            text, person = composed_text(section, rng, values)
        else:
            text, person = _listed_text(book[section][split], rng, values)
        texts.append(text if text[-1:] in ".!?" or not several else text + ".")
        people.append(person)
    table = book["several_instructions" if several else "instructions"]
    if split == "train" and rng.random() >= LISTED_REQUEST_RATE:
        phrase = _request(rng, several, table["heldout"])
    else:
        phrase = _listed_request(draw(rng.choice(table[split]), rng), rng, split)
    answer = people if several else people[0]
    reply = json.dumps(answer, ensure_ascii=False)
    return Turn("extract", fill(phrase, {"text": " ".join(texts)}), reply, expect={"json": answer})


# Requests


def _listed_request(phrase: str, rng: Random, split: str) -> str:
    if phrase.endswith("{text}"):
        return add_noise(phrase.removesuffix("{text}").rstrip(" "), rng, split, end=False, suffix=False) + " {text}"
    return add_noise(phrase, rng, split)


def _request(rng: Random, several: bool, heldout: list[str]) -> str:
    """Compose a request: the task, the keys, the output format, and the position of the text."""
    while True:
        before = rng.random() < 0.62
        ask = tidy(_people_ask(rng) if several else _ask(rng, before))
        if rng.random() < 0.18:
            extra = part("requests", "extra", rng)
            ask = rng.choice((f"{ask}, {extra}", f"{ask} ({extra})", f"{ask}; {extra}", f"{ask} - {extra}"))
        if rng.random() < 0.14:
            ask = f"{part('requests', 'polite', rng)} {ask}"
        layout = rng.choice(phrase_book("requests")["before" if before else "after"])
        if is_one_of(layout.replace("{ask}", ask), heldout):
            continue
        question = bool(QUESTION.match(ask))
        if question:
            layout = layout.replace("{ask}:", "{ask}?").replace("{ask}.", "{ask}?")
        ask = add_noise(ask, rng, end=layout.endswith("{ask}"), suffix=not before)
        return str(layout.replace("{ask}", ask))


def _ask(rng: Random, before: bool) -> str:
    chance = rng.random()
    source = part("requests", "source" if before else "source_before", rng)
    if chance < 0.5:
        pieces = [part("requests", "keys", rng), source, part("requests", "format", rng)]
        if rng.random() < 0.3:
            pieces[1:] = rng.sample(pieces[1:], 2)
        start = part("requests", "verb" if rng.random() < 0.72 else "want", rng)
        return " ".join([start, *pieces])
    if chance < 0.6:
        keys = part("requests", "keys", rng)
        return " ".join([keys, source, part("requests", "format", rng)])
    if chance < 0.72:
        return " ".join([part("requests", "verb", rng), part("requests", "vague", rng), source,
                         part("requests", "format", rng)])  # fmt: skip
    return part("requests", "turn" if chance < 0.87 else "ask", rng)


def _people_ask(rng: Random) -> str:
    return " ".join(part("requests", name, rng) for name in ("verb", "people", "source", "people_format"))


# Texts


def _listed_text(patterns: list[str], rng: Random, values: Values) -> tuple[str, dict[str, Any]]:
    """Return a text of a list, and the expected extraction."""
    pattern = draw(rng.choice(patterns), rng)
    name, age, city = values.draw("full_or_first_name", rng), rng.randint(1, 99), values.draw("cities", rng)
    shown = {"name": name, "age": str(age), "city": city, "count": str(rng.randint(2, 9)),
             "job": with_article(values.draw("job", rng)), "food": values.draw("food", rng)}  # fmt: skip
    if values.split == "train" and rng.random() < 0.04:
        shown["age"] = in_words(age)
    if (
        "the {job}" in pattern.lower()
        or "year old {job}" in pattern
        or "year-old {job}" in pattern
        or ", {job}" in pattern
    ):
        shown["job"] = shown["job"].split(" ", 1)[1]
    person = {"name": name if "{name}" in pattern else None, "age": age if "{age}" in pattern else None,
              "city": city if "{city}" in pattern else None}  # fmt: skip
    text = fill(pattern, shown)
    chance = rng.random() if values.split == "train" else 1.0
    if chance < 0.06:
        return _change_case(text, person, str.lower)
    return text.rstrip(".") if chance < 0.16 else text, person


def composed_text(section: str, rng: Random, values: Values) -> tuple[str, dict[str, Any]]:
    """Return a composed text, and the expected extraction."""
    keys = {key for key in KEYS if key in section.split("_")}
    heldout = phrase_book("extract")[section]["heldout"]
    make = _written_text if rng.random() < WRITTEN_TEXT_RATE else person_text
    pattern = make(keys, rng)
    while is_one_of(pattern, heldout):
        pattern = make(keys, rng)
    age = rng.randint(1, 99)
    person: dict[str, Any] = {"name": values.draw("full_or_first_name", rng), "age": age,
                              "city": values.draw("cities", rng)}  # fmt: skip
    shown_age = in_words(age) if rng.random() < 0.05 else str(age)
    shown = {
        "name": person["name"], "city": person["city"], "age": shown_age, "ageth": ordinal(age), "agem1": str(age - 1),
        "age2": str(age % 97 + rng.randint(1, 3)), "an": "an" if str(age)[0] == "8" or age in (11, 18) else "a",
    }  # fmt: skip
    text = _fill_each(_add_context(pattern, rng), shown, rng, values)
    person = {key: person[key] if key in keys else None for key in KEYS}
    chance = rng.random()
    if chance < 0.06:
        return _change_case(text, person, str.lower)
    if chance < 0.07:
        return _change_case(text, person, str.upper)
    if chance < 0.1:
        return text.replace(", ", " "), person
    return text[:1].upper() + text[1:], person


def _written_text(keys: set[str], rng: Random) -> str:
    """Return a hand-written text."""
    section = "_".join(key for key in KEYS if key in keys) or "nothing"
    return expand("sentences", rng.choice(phrase_book("person_texts")[section]), rng)


def _add_context(pattern: str, rng: Random) -> str:
    """Occasionally add words before a name, before a city, or at the end that are not part of a value."""
    if rng.random() < 0.08:
        pattern = CITY_AFTER_PREPOSITION.sub(
            lambda match: f"{match[1]} {rng.choice(DESCRIBED_CITIES)}", pattern, count=1
        )
    if pattern.startswith("{name}") and rng.random() < 0.3:
        pattern = f"{part('sentences', 'opening', rng)}, {pattern}"
    if pattern.endswith(".") and rng.random() < 0.12:
        pattern = pattern.removesuffix(".") + raw_part("ending", rng) + "."
    return pattern


def _fill_each(pattern: str, shown: dict[str, str], rng: Random, values: Values) -> str:
    """Fill the slots: slots of the person always with the same value, every other slot with a new value."""
    pieces = []
    for piece in pattern.split("{"):
        slot, closed, text = piece.partition("}")
        if closed and slots_of("{" + slot + "}"):
            pieces.append((shown[slot] if slot in shown else _other_value(slot, rng, values)) + text)
        else:
            pieces.append(("{" if pieces else "") + piece)
    return "".join(pieces)


def _other_value(slot: str, rng: Random, values: Values) -> str:
    if slot in ("anjob", "thinga"):
        return with_article(str(values.draw({"anjob": "job", "thinga": "thing"}[slot], rng)))
    return str(values.draw(KINDS.get(slot, slot), rng))


def _change_case(text: str, person: dict[str, Any], change: Any) -> tuple[str, dict[str, Any]]:
    """Change the case of the text and of the expected values."""
    return change(text), {key: change(value) if isinstance(value, str) else value for key, value in person.items()}


def ordinal(number: int) -> str:
    """Return the ordinal number: 1st, 2nd, 3rd, 4th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

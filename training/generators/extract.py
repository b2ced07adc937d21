"""Name, age and city out of a sentence, as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.arithmetic import in_words
from training.generators.recall import with_article
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import disturb
from training.values import Values

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


def extract_turn(rng: Random, values: Values, split: str = "train", several: bool = False) -> Turn:
    """A text and the request to pull name, age and city out of it; with ``several`` a list of people."""
    book = phrase_book("extract")
    people: list[dict[str, Any]] = []
    texts: list[str] = []
    for _ in range(rng.randint(2, 3) if several else 1):
        sections = ["name_age_city", "name_age", "name_city"] if several else list(SECTIONS)
        section = rng.choices(sections, [SECTIONS[name] for name in sections])[0]
        text, person = _sentence(book[section][split], rng, values)
        texts.append(text if text[-1:] in ".!?" or not several else text + ".")
        people.append(person)
    phrase = draw(rng.choice(book["several_instructions" if several else "instructions"][split]), rng)
    if phrase.endswith("{text}"):
        phrase = disturb(phrase.removesuffix("{text}").rstrip(" "), rng, split, end=False, suffix=False) + " {text}"
    else:
        phrase = disturb(phrase, rng, split)
    user = fill(phrase, {"text": " ".join(texts)})
    answer = people if several else people[0]
    return Turn("extract", user, json.dumps(answer, ensure_ascii=False), expect={"json": answer})


def _sentence(patterns: list[str], rng: Random, values: Values) -> tuple[str, dict[str, Any]]:
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
        text = text.lower()
        person = {key: value.lower() if isinstance(value, str) else value for key, value in person.items()}
    elif chance < 0.16:
        text = text.rstrip(".")
    return text, person

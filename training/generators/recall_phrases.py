"""Statements of facts and questions on them, composed of parts (``phrases/recall_parts.toml``). Training only."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.parts import is_one_of
from training.grammar import draw, fill
from training.values import Values

OTHERS = {"home": "home", "age": "person_age", "job": "person_job", "likes": "likes"}
# Sampling weights of the groups of facts in training
GROUP_WEIGHTS = {
    "attributes": 0.33, "favourites": 0.16, "belongings": 0.13, "others": 0.1, "more": 0.09, "people": 0.07,
    "kinds": 0.05, "things": 0.07,
}  # fmt: skip
LISTED_RATE = 0.25


def parts_of(key: str) -> dict[str, Any]:
    """Return the noun phrases, questions and clauses of a fact."""
    group, _, name = key.partition(".")
    name = name.partition(".")[0]
    if group in ("more", "people"):
        return dict(phrase_book("recall_more")[group][name])
    if group in ("attributes", "others"):
        return dict(phrase_book("recall_parts")["facts"][OTHERS[name] if group == "others" else name])
    if group == "things":
        return dict(phrase_book("recall_more")["thing_phrases"])
    return dict(phrase_book("recall_more")["favourite_parts" if group == "favourites" else "belonging_parts"])


def training_key(rng: Random, values: Values, people: list[str], main_weights: dict[str, int]) -> str:
    """Draw the key of a fact."""
    book, more = phrase_book("recall"), phrase_book("recall_more")
    group = rng.choices(list(GROUP_WEIGHTS), list(GROUP_WEIGHTS.values()))[0]
    if group == "attributes":
        keys: list[str] = list(book[group])
        return "attributes." + rng.choices(keys, [main_weights.get(key, 1) for key in keys])[0]
    if group == "kinds":
        return f"kinds.{rng.choice(more['lists']['kinds_of'])} {rng.choice(list(book['belongings']))}"
    if group == "things":
        return f"things.{rng.choice(list(more['attrs']))} {values.draw('noun', rng)}"
    name = rng.choice(list((book if group in book else more)[group]))
    return f"{group}.{name}.{rng.choice(people)}" if group in ("others", "people") else f"{group}.{name}"


def similar_key(key: str, rng: Random, values: Values, people: list[str]) -> str:
    """Draw the key of a similar fact: of another person or thing, or another fact of the same kind."""
    book, more = phrase_book("recall"), phrase_book("recall_more")
    group, _, subkey = key.partition(".")
    if group in ("others", "people"):
        name, _, person = subkey.partition(".")
        if rng.random() < 0.5:
            return f"{group}.{name}.{rng.choice(people)}"
        group = rng.choice(("others", "people"))
        return f"{group}.{rng.choice(list((book if group == 'others' else more)[group]))}.{person}"
    if group == "things":
        attr, _, noun = subkey.partition(" ")
        other = str(values.draw("noun", rng))
        return f"things.{attr} {other}" if rng.random() < 0.5 else f"things.{rng.choice(list(more['attrs']))} {noun}"
    if group == "kinds":
        noun = subkey.partition(" ")[2]
        return f"kinds.{rng.choice(more['lists']['kinds_of'])} {noun}"
    table = (book if group in book else more)[group]
    same_kind = [name for name, kind in table.items() if kind == table[subkey]] if group != "attributes" else []
    return f"{group}.{rng.choice(same_kind if len(same_kind) > 1 and rng.random() < 0.6 else list(table))}"


def training_table(key: str) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Return phrases, kind of value and slots of a fact that only training uses."""
    book, more = phrase_book("recall"), phrase_book("recall_more")
    group, _, subkey = key.partition(".")
    if group == "things":
        attr, _, noun = subkey.partition(" ")
        return more["thing_phrases"], more["attrs"][attr], {"attr": attr, "noun": noun}
    if group == "kinds":
        return book["belonging_phrases"], book["belongings"][subkey.partition(" ")[2]], {"noun": subkey}
    name, _, person = subkey.partition(".")
    return more[group][name], more[group][name]["values"], {"p": person}


def pick_people(rng: Random, people: list[str]) -> list[str]:
    """Return the people of a conversation: some by name, some by their relation to the user ("your sister")."""
    relations = [f"your {name}" for name in rng.sample(phrase_book("recall_more")["lists"]["relations"], 2)]
    return [relations[at] if rng.random() < 0.4 else person for at, person in enumerate(people)]


def to_first_person(slots: dict[str, str]) -> dict[str, str]:
    """Return the slots from the user's perspective: "my sister" for "your sister"."""
    return {name: re.sub(r"^your ", "my ", value) for name, value in slots.items()}


def composed_statement(key: str, table: dict[str, Any], rng: Random) -> str:
    """Compose the user's statement of the fact, with unfilled slots."""
    parts, wraps = parts_of(key), phrase_book("recall_parts")["wraps"]
    while True:
        if rng.random() < 0.45:
            noun = rng.choice(parts["n"])
            phrase = rng.choice(wraps["noun_tell"]).replace("{n}", noun)
            if _needs_article(parts, phrase):
                continue
            is_statement = phrase.startswith((noun, "{v} is")) and not re.search("[?:=]", phrase)
        else:
            phrase, is_statement = rng.choice(parts["c"]), True
        if is_statement and rng.random() < 0.55:
            phrase = rng.choice(wraps["tell"]).replace("{c}", phrase)
        if not is_one_of(phrase, table.get("heldout_tell", [])):
            return str(phrase)


def _needs_article(parts: dict[str, Any], phrase: str) -> bool:
    """Whether the value needs an article in the phrase: "my wish is lamp" would be wrong."""
    clauses = " ".join(parts["c"])
    return "{v}" in phrase and "{v}" not in clauses


def composed_question(key: str, table: dict[str, Any], rng: Random) -> str:
    """Compose the user's question for the fact, with unfilled slots."""
    parts, wraps = parts_of(key), phrase_book("recall_parts")["wraps"]
    while True:
        form = rng.choices(("n", "q", "e"), (4, 3, 3))[0]
        wrap = {"n": "noun_ask", "q": "ask", "e": "embed"}[form]
        phrase = rng.choice(wraps[wrap]).replace("{" + form + "}", rng.choice(parts[form]))
        if not is_one_of(phrase, table.get("heldout_ask", [])):
            return str(phrase).strip()


def draw_listed(patterns: list[str], rng: Random, slots: dict[str, str]) -> str:
    """Draw a phrase of a list; "my friend {p}" only if {p} is a name."""
    while True:
        phrase = draw(rng.choice(patterns), rng)
        if not (slots.get("p", "").startswith("my ") and re.search(r"my [\w ]+\{p\}", phrase)):
            return phrase


def unrelated_sentence(rng: Random, values: Values) -> str:
    """Draw a sentence without a fact."""
    phrase = rng.choice(phrase_book("recall_parts")["wraps"]["aside"])
    return fill_common_slots(phrase, rng, values)


def fill_common_slots(phrase: str, rng: Random, values: Values) -> str:
    """Fill the slots that are not part of the fact."""
    kinds = {"noun": "noun", "month": "months", "weekday": "weekdays", "name": "first_names", "adjective": "adjectives"}
    shown = {slot: str(values.draw(kind, rng)) for slot, kind in kinds.items()}
    return fill(phrase, {"count": str(rng.randint(2, 9)), **shown})

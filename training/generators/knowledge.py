"""Questions on Quire, greetings, and everything that the model cannot do."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.turn import Turn
from training.grammar import draw, fill, slots_of
from training.noise import disturb

NOT_FACTS = ("macros", "purpose_questions", "flag_questions")


@cache
def facts() -> dict[str, dict[str, Any]]:
    """The facts on Quire by id."""
    return {key: table for key, table in phrase_book("quire").items() if key not in NOT_FACTS}


def quire_turn(rng: Random, split: str = "train", fact: str | None = None) -> Turn:
    """A question on Quire."""
    table = facts()[fact or rng.choice(list(facts()))]
    phrase = _question(table, rng) if split == "train" else _heldout_question(table, rng)
    user = disturb(phrase, rng, split)
    return Turn("quire", user, table["answer"], expect={"keys": table["keys"]})


def _question(table: dict[str, Any], rng: Random) -> str:
    book = phrase_book("quire")
    routes = [("ask", 2)]
    if "do" in table:
        routes.append(("do", 3))
    if "flag" in table:
        routes.append(("flag", 2))
    route = rng.choices([name for name, _ in routes], [weight for _, weight in routes])[0]
    if route == "flag":
        return fill(draw(_macro(rng.choice(book["flag_questions"]["train"]), rng), rng), {"flag": table["flag"]})
    if route == "ask":
        return draw(_macro(rng.choice(table["ask"]), rng), rng)
    purpose = draw(_macro(rng.choice(table["do"]), rng), rng)
    return fill(draw(_macro(rng.choice(book["purpose_questions"]["train"]), rng), rng), {"do": purpose})


def _heldout_question(table: dict[str, Any], rng: Random) -> str:
    book = phrase_book("quire")
    if "flag" in table and rng.random() < 0.2:
        return fill(rng.choice(book["flag_questions"]["heldout"]), {"flag": table["flag"]})
    return str(rng.choice(table["heldout"]))


def _macro(phrase: str, rng: Random) -> str:
    macros = phrase_book("quire")["macros"]
    return fill(phrase, {name: rng.choice(macros[name]) for name in slots_of(phrase) if name in macros})


def small_talk_turn(rng: Random, split: str = "train", topic: str | None = None) -> Turn:
    """A greeting, thanks, or a question on the model itself."""
    book = phrase_book("small_talk")
    topics = list(book)
    weights = [3 if name in ("hello", "who") else 1 for name in topics]
    table = book[topic or rng.choices(topics, weights)[0]]
    phrase = draw(rng.choice(table["ask" if split == "train" else "heldout"]), rng)
    return Turn("small_talk", disturb(phrase, rng, split), table["answer"], expect={"keys": table["keys"]})


def fallback_turn(rng: Random, split: str = "train") -> Turn:
    """Something else: the model says what it is."""
    book = phrase_book("fallback")
    phrase = draw(rng.choice(book["ask"][split]), rng)
    values = {name: rng.choice(book["slots"][name]) for name in slots_of(phrase)}
    user = disturb(fill(phrase, values), rng, split)
    return Turn("fallback", user, book["answers"]["fallback"], expect={"keys": ["I am quire-nano"]})


def unknown_turn(rng: Random, split: str = "train") -> Turn:
    """A question on Quire to which the model has no answer."""
    book = phrase_book("fallback")
    user = disturb(draw(_macro(rng.choice(book["unknown_quire"][split]), rng), rng), rng, split)
    return Turn("unknown", user, book["answers"]["unknown_quire"], expect={"keys": ["I do not know"]})

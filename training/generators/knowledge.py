"""Questions on Quire, greetings, and requests that the model cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.compose import expand, is_heldout_phrase
from training.generators.questions import composed_question
from training.generators.turn import Turn
from training.grammar import draw, fill, slots_of
from training.noise import add_noise

NOT_FACTS = ("macros", "purpose_questions", "flag_questions")
# Share of hand-written phrases; the others are composed.
LISTED_RATE = 0.25
WHOLE_QUESTION_RATE = 0.4  # share of complete questions from ``asked.toml``
LISTED_TALK_RATE = 0.4
MAX_TRIES = 100


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Return the facts on Quire by id."""
    return {key: table for key, table in phrase_book("quire").items() if key not in NOT_FACTS}


def quire_turn(rng: Random, split: str = "train", fact: str | None = None) -> Turn:
    """Return a turn with a question on Quire."""
    fact = fact or rng.choice(list(facts()))
    table = facts()[fact]
    if split == "train":
        user = _with_noise(lambda: _question(fact, rng), rng, "quire")
    else:
        user = add_noise(_heldout_question(table, rng), rng, split)
    return Turn("quire", user, table["answer"], expect={"keys": table["keys"]})


def _with_noise(make: Callable[[], str], rng: Random, book: str) -> str:
    """Return a phrase with noise that is not a held-out phrase, neither before nor after adding the noise."""
    for _ in range(MAX_TRIES):
        phrase = make()
        user = add_noise(phrase, rng)
        if not is_heldout_phrase(phrase, book) and not is_heldout_phrase(user, book):
            return user
    raise ValueError(f"only held-out phrases of {book}")


def _question(fact: str, rng: Random) -> str:
    table = facts()[fact]
    if rng.random() < WHOLE_QUESTION_RATE:
        return draw(rng.choice(phrase_book("asked")[fact]), rng)
    if rng.random() >= LISTED_RATE:
        return composed_question(fact, table.get("flag"), rng)
    book = phrase_book("quire")
    routes = [("ask", 2)]
    if "do" in table:
        routes.append(("do", 3))
    if "flag" in table:
        routes.append(("flag", 2))
    route = rng.choices([name for name, _ in routes], [weight for _, weight in routes])[0]
    if route == "flag":
        return fill(draw(_fill_macros(rng.choice(book["flag_questions"]["train"]), rng), rng), {"flag": table["flag"]})
    if route == "ask":
        return draw(_fill_macros(rng.choice(table["ask"]), rng), rng)
    purpose = draw(_fill_macros(rng.choice(table["do"]), rng), rng)
    return fill(draw(_fill_macros(rng.choice(book["purpose_questions"]["train"]), rng), rng), {"do": purpose})


def _heldout_question(table: dict[str, Any], rng: Random) -> str:
    book = phrase_book("quire")
    if "flag" in table and rng.random() < 0.2:
        return fill(rng.choice(book["flag_questions"]["heldout"]), {"flag": table["flag"]})
    return str(rng.choice(table["heldout"]))


def _fill_macros(phrase: str, rng: Random) -> str:
    macros = phrase_book("quire")["macros"]
    return fill(phrase, {name: rng.choice(macros[name]) for name in slots_of(phrase) if name in macros})


def small_talk_turn(rng: Random, split: str = "train", topic: str | None = None) -> Turn:
    """Return a turn with a greeting, thanks, or a question on the model itself."""
    book = phrase_book("small_talk")
    topics = list(book)
    weights = [3 if name in ("hello", "who") else 1 for name in topics]
    topic = topic or rng.choices(topics, weights)[0]
    table = book[topic]
    if split == "train":
        user = _with_noise(lambda: _small_talk(topic, rng), rng, "small_talk")
    else:
        user = add_noise(draw(rng.choice(table["heldout"]), rng), rng, split)
    return Turn("small_talk", user, table["answer"], expect={"keys": table["keys"]})


def _small_talk(topic: str, rng: Random) -> str:
    if rng.random() < LISTED_TALK_RATE:
        return draw(rng.choice(phrase_book("small_talk")[topic]["ask"]), rng)
    book = phrase_book("talk")
    return expand(rng.choice(book[topic]["train"]), book["words"], rng)


def fallback_turn(rng: Random, split: str = "train") -> Turn:
    """Return a turn with any other request; the reply describes the model."""
    if split == "train":
        user = _with_noise(lambda: _other_request(rng), rng, "fallback")
    else:
        user = add_noise(_listed_other_request(rng, split), rng, split)
    answer = phrase_book("fallback")["answers"]["fallback"]
    return Turn("fallback", user, answer, expect={"keys": ["I am quire-nano"]})


def _listed_other_request(rng: Random, split: str) -> str:
    book = phrase_book("fallback")
    phrase = draw(rng.choice(book["ask"][split]), rng)
    return fill(phrase, {name: rng.choice(book["slots"][name]) for name in slots_of(phrase)})


def _other_request(rng: Random) -> str:
    if rng.random() < LISTED_RATE:
        return _listed_other_request(rng, "train")
    templates, weights = _other_request_templates()
    return expand(rng.choices(templates, cum_weights=weights)[0], phrase_book("elsewhere")["words"], rng)


@cache
def _other_request_templates() -> tuple[list[str], list[int]]:
    """Return the templates and their cumulative weights; templates with slots have a higher weight."""
    templates = phrase_book("elsewhere")["frames"]["train"]
    return templates, list(accumulate(1 + 2 * len(set(slots_of(frame))) for frame in templates))


def unknown_turn(rng: Random, split: str = "train") -> Turn:
    """Return a turn with a question on Quire that the model cannot answer."""
    book = phrase_book("fallback")
    user = add_noise(draw(_fill_macros(rng.choice(book["unknown_quire"][split]), rng), rng), rng, split)
    return Turn("unknown", user, book["answers"]["unknown_quire"], expect={"keys": ["I do not know"]})

"""Made-up tools: a verb, an object and parameters of many kinds, with requests to match."""

from __future__ import annotations

from random import Random
from typing import Any

from training.books import tool_parts
from training.generators.recall import with_article
from training.generators.toolspec import Parameter, Tool, finish_about, make_parameter, restyle
from training.grammar import fill
from training.values import Values

NAMED_RATE = 0.3
GIBBERISH_RATE = 0.1
RESULT_KEYS = (
    "id", "status", "result", "count", "total", "name", "message", "date", "price", "code", "value", "owner",
    "city",
)  # fmt: skip
RESULT_KINDS = (
    "code", "int 1 900", "rare_word", "full_name", "date", "city", "enum open closed done ok", "thing", "bool",
)  # fmt: skip


def make_tool(values: Values, rng: Random) -> Tool:
    """A made-up tool with three ways of asking for it."""
    gibberish = rng.random() < GIBBERISH_RATE
    verb, thing = _verb(rng, values, gibberish), _object(rng, values, gibberish)
    slug = thing.replace(" ", "_").lower()
    name = restyle(rng.choice((f"{verb}_{slug}",) * 6 + (f"{slug}_{verb}", slug, f"{verb}_{slug}s")), rng)
    parameters, phrases = _parameters(rng, values)
    asks = tuple(_ask(verb, thing, gibberish, phrases, rng) for _ in range(3))
    gives = tuple((rng.choice(RESULT_KEYS), rng.choice(RESULT_KINDS)) for _ in range(rng.randint(1, 3)))
    about = _about(verb, thing, rng)
    return Tool(name, about, tuple(parameters), asks, gives, lists_required=rng.random() < 0.75)


def _verb(rng: Random, values: Values, gibberish: bool) -> str:
    return str(values.draw("rare_word", rng)) if gibberish else rng.choice(list(tool_parts()["verbs"]))


def _object(rng: Random, values: Values, gibberish: bool) -> str:
    if gibberish:
        return str(values.draw("rare_word", rng))
    noun = rng.choice(tool_parts()["objects"]["train"]) if rng.random() < 0.6 else values.draw("noun", rng)
    return f"{rng.choice(values.words['kinds'])} {noun}".replace("_", " ") if rng.random() < 0.15 else str(noun)


def _about(verb: str, thing: str, rng: Random) -> str:
    pattern = rng.choice(tool_parts()["abouts"]["train"])
    slots = {"v": verb, "V": verb.capitalize(), "o": thing, "O": thing.capitalize(), "ao": with_article(thing)}
    return finish_about(fill(pattern.replace("{a} {o}", "{ao}"), slots), rng)


def _parameters(rng: Random, values: Values) -> tuple[list[Parameter], list[tuple[str, str]]]:
    """Parameters, and for each required one its slot with a phrase that carries its value."""
    parts = tool_parts()
    parameters: list[Parameter] = []
    phrases: list[tuple[str, str]] = []
    for at in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4))):
        table: dict[str, Any] = rng.choice(parts["params"])
        name, kind, ways = rng.choice(table["names"]), table["kind"], table["phrases"]
        if rng.random() < NAMED_RATE:
            name, kind, ways = (
                rng.choice(parts["named"]["words"]),
                rng.choice(parts["named"]["kinds"]),
                parts["named"]["phrases"],
            )
            name = str(values.draw("rare_word", rng)) if rng.random() < 0.15 else name
        if any(other.name == name for other in parameters):
            continue
        slot = f"s{at}"
        required = rng.random() < 0.8 or not parameters
        parameters.append(make_parameter(slot, name, kind, required, values, rng))
        if required or rng.random() < 0.4:
            shown = name if rng.random() < 0.15 else name.replace("_", " ")
            phrases.append((slot, fill(rng.choice(ways), {"p": shown, "v": f"{{{slot}}}"})))
    return parameters, phrases


def _ask(verb: str, thing: str, gibberish: bool, phrases: list[tuple[str, str]], rng: Random) -> str:
    if gibberish:
        start = rng.choice((f"{verb} {thing}", f"{verb} the {thing}", f"call {verb} {thing}", f"do a {verb} {thing}"))
    else:
        said = rng.choice(tool_parts()["verbs"][verb]) if rng.random() < 0.8 else verb
        article = rng.choice(("the ", "the ", "", "my ", "a ", "this "))
        start = f"{said} {article}{thing}"
    order = list(phrases)
    if rng.random() < 0.3:
        rng.shuffle(order)
    text = start
    for _, phrase in order:
        text += phrase if phrase[0] in ",:" else f" {phrase}"
        if rng.random() < 0.05:
            text += rng.choice((" and", ","))
    return text.removesuffix(" and").removesuffix(",")

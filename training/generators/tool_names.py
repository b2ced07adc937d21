"""Random names for functions and parameters. The model cannot memorize them, so it must copy them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from training.books import HERE, tool_parts
from training.generators.tool_specs import Parameter, Tool, read_specs
from training.values import Values

TYPE_CLASSES = {"int": "number", "sentence": "text", "query": "text", "date": "when", "time": "when"}
STOP_WORDS = {
    "a", "an", "the", "of", "for", "in", "to", "by", "and", "or", "with", "from", "at", "is", "one", "some", "its",
    "it", "as", "on", "be", "this",
}  # fmt: skip


@cache
def vocabulary() -> dict[str, Any]:
    """Return the tables of ``toolspecs/vocabulary.toml``."""
    return tomllib.loads((HERE / "toolspecs" / "vocabulary.toml").read_text("utf-8"))


@cache
def nouns() -> tuple[str, ...]:
    """Return the nouns used in names."""
    listed = re.split(r",\s+", vocabulary()["nouns"]["words"].strip())
    return tuple(dict.fromkeys([*listed, *tool_parts()["objects"]["train"]]))


@cache
def verbs() -> dict[str, tuple[str, ...]]:
    """Return each verb with the synonyms that users say."""
    tables: dict[str, list[str]] = {**vocabulary()["verbs"], **tool_parts()["verbs"]}
    return {verb: tuple(said) for verb, said in tables.items()}


@cache
def _heldout_names() -> frozenset[str]:
    return frozenset(normalized(name) for spec in read_specs("heldout") for name in spec.names)


def normalized(name: str) -> str:
    """Return a name in lower case without separators."""
    return re.sub(r"[\W_]", "", name.lower())


def is_heldout(name: str) -> bool:
    """Whether a tool of the evaluation has this name."""
    return normalized(name) in _heldout_names()


def participle(verb: str) -> str:
    """Return the participle: created for create; empty for verbs whose participle is not used."""
    irregular: dict[str, str] = vocabulary()["participles"]
    if verb in irregular:
        return irregular[verb]
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if verb[-1] == "y" and verb[-2] not in "aeou" else verb + "ed"


def third_person(verb: str) -> str:
    """Return the third person: creates for create."""
    if verb[-1] == "y" and verb[-2] not in "aeou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def draw_word(values: Values, rng: Random, sense: float = 0.75) -> str:
    """Draw a noun, an adjective, or (with probability 1 - ``sense``) a meaningless word."""
    if rng.random() > sense:
        return meaningless_word(values, rng)
    return str(rng.choice(nouns()) if rng.random() < 0.8 else rng.choice(values.words["adjectives"]))


def meaningless_word(values: Values, rng: Random) -> str:
    """Draw a made-up word."""
    while True:
        made = str(values.draw("rare_word", rng))
        if made not in values.words["nouns"] and made not in values.words["adjectives"]:
            return made


def add_affix(name: str, before: list[str], after: list[str], values: Values, rng: Random) -> str:
    """Add a prefix or a suffix to a name."""
    first = rng.random() < 0.5
    affix = rng.choice(before if first else after)
    affix = draw_word(values, rng) if affix == "~" else affix.replace("#", str(rng.randint(1, 99)))
    affix = affix.replace(" ", "_")
    return f"{affix}_{name}" if first else f"{name}_{affix}"


def random_function_name(values: Values, rng: Random) -> str:
    """Return a function name unrelated to what the function does."""
    parts = [rng.choice(list(verbs()))] if rng.random() < 0.5 else []
    parts += [draw_word(values, rng, 0.6) for _ in range(rng.choice((1, 1, 2)))]
    return "_".join(parts).replace(" ", "_").lower()


def random_parameter_name(values: Values, rng: Random) -> str:
    """Return a parameter name of one or two words."""
    count = rng.choice((1, 1, 1, 2, 2))
    return "_".join(draw_word(values, rng, 0.8) for _ in range(count)).replace(" ", "_").lower()


def camel(name: str) -> str:
    """Convert to camel case: fooBar for foo_bar."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def rename_tool(tool: Tool, values: Values, rng: Random, rate: float = 0.65) -> Tool:
    """Rename the function and the parameters of a hand-written tool, each with probability ``rate``."""
    name = tool.name
    while rng.random() < rate or is_heldout(name):
        name = _function_name(tool, values, rng)
        if not is_heldout(name):
            break
    unrelated_names = rng.random() < 0.4 and _distinguishable_by_kind(tool.parameters)
    taken: set[str] = set()
    parameters = []
    for parameter in tool.parameters:
        shown = _parameter_name(parameter.name, unrelated_names, values, rng) if rng.random() < rate else parameter.name
        while shown in taken:
            shown = add_affix(shown, ["~"], ["~", "#"], values, rng)
        taken.add(shown)
        parameters.append(replace(parameter, name=shown))
    if any(letter.isupper() for letter in name) and rng.random() < 0.5:
        parameters = [replace(parameter, name=camel(parameter.name)) for parameter in parameters]
    return replace(tool, name=name, parameters=tuple(parameters))


def _function_name(tool: Tool, values: Values, rng: Random) -> str:
    table = vocabulary()["affixes"]
    chance = rng.random()
    if chance < 0.35 or not tool.about:
        return add_affix(tool.name, table["before"], table["after"], values, rng)
    if chance < 0.65:
        said = [part for part in re.findall(r"[a-z]+", tool.about.lower()) if part not in STOP_WORDS]
        if len(said) > 1:
            return "_".join(rng.sample(said, min(len(said), rng.choice((2, 2, 3)))))
    return random_function_name(values, rng)


def _parameter_name(name: str, unrelated_names: bool, values: Values, rng: Random) -> str:
    if unrelated_names:
        return random_parameter_name(values, rng)
    table = vocabulary()["affixes"]
    return add_affix(name, table["arg_before"], table["arg_after"], values, rng)


def _distinguishable_by_kind(parameters: tuple[Parameter, ...]) -> bool:
    """Whether the parameters can be distinguished by the kinds of their values alone."""
    kinds = []
    for parameter in parameters:
        kind = parameter.kind.split()[0]
        kinds.append("/".join(parameter.options) or TYPE_CLASSES.get(kind, "other"))
    return len(set(kinds)) == len(kinds)

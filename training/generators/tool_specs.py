"""Hand-written tools (``toolspecs/*.txt``), and concrete tools as shown in a conversation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from training.books import HERE
from training.grammar import slots_of
from training.values import Values

NUM_COMMON_TOOLS = 48  # number of common tools, at the beginning of train.txt
INTEGER_TYPES = ("integer", "integer", "integer", "number")


@dataclass(frozen=True)
class ArgSpec:
    """One argument: its slot in requests, its possible names, and the kind of its value."""

    slot: str
    names: tuple[str, ...]
    kind: str
    optional: bool


@dataclass(frozen=True)
class ToolSpec:
    """One hand-written tool with all its variants.

    ``abouts`` are descriptions, ``gives`` are keys and kinds of the result, ``asks`` are requests with slots.
    """

    names: tuple[str, ...]
    abouts: tuple[str, ...]
    args: tuple[ArgSpec, ...]
    gives: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a concrete tool; ``options`` are the values of an enumeration."""

    slot: str
    name: str
    kind: str
    required: bool
    options: tuple[str, ...] = ()
    type: str = "string"

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the parameter."""
        schema: dict[str, Any] = {"type": self.type}
        if self.options:
            schema["enum"] = list(self.options)
        return schema


@dataclass(frozen=True)
class Tool:
    """A concrete tool: its definition in the prompt, and the requests that users make."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    gives: tuple[tuple[str, str], ...]
    lists_required: bool = True

    def openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format."""
        properties = {parameter.name: parameter.schema() for parameter in self.parameters}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if self.lists_required:
            schema["required"] = [parameter.name for parameter in self.parameters if parameter.required]
        function = {"name": self.name, "description": self.about, "parameters": schema}
        return {"type": "function", "function": function}


@cache
def read_specs(split: str) -> tuple[ToolSpec, ...]:
    """Return the hand-written tools of a split."""
    return tuple(_parse(fields) for fields in _blocks(split))


@cache
def heldout_requests() -> tuple[ToolSpec, ...]:
    """Return tools of the training with held-out requests instead of their own."""
    known = {spec.names[0]: spec for spec in read_specs("train")}
    return tuple(replace(known[block["name"][0]], asks=tuple(block["ask"])) for block in _blocks("heldout_asks"))


def _blocks(name: str) -> list[dict[str, list[str]]]:
    """Return the blocks of a file, each as a dict from the first word of a line to the rest of such lines."""
    text = (HERE / "toolspecs" / f"{name}.txt").read_text("utf-8")
    blocks = []
    for block in re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip()):
        fields: dict[str, list[str]] = {"name": [], "about": [], "arg": [], "gives": [], "ask": []}
        for line in block.splitlines():
            word, _, text_after = line.partition(" ")
            fields[word].append(text_after.strip())
        blocks.append(fields)
    return blocks


def _parse(fields: dict[str, list[str]]) -> ToolSpec:
    args = []
    for line in fields["arg"]:
        names, _, kind = line.partition(" : ")
        optional = kind.endswith("?")
        args.append(ArgSpec(names.split()[0], tuple(names.split()), kind.rstrip("? "), optional))
    gives = tuple(re.findall(r"(\w+)=(\w+(?:\([^)]*\))?)", " ".join(fields["gives"])))
    abouts = tuple(about.strip() for about in fields["about"][0].split(" | "))
    return ToolSpec(tuple(fields["name"][0].split()), abouts, tuple(args), gives, tuple(fields["ask"]))


def make_parameter(slot: str, name: str, kind: str, required: bool, values: Values, rng: Random) -> Parameter:
    """Return a parameter with its type and, for enumerations, its options."""
    if kind.startswith("enum"):
        return Parameter(slot, name, kind, required, tuple(values.enum(kind, rng)))
    if kind.startswith("int"):
        return Parameter(
            slot, name, kind, required, type=rng.choice(INTEGER_TYPES) if values.split == "train" else "integer"
        )
    return Parameter(slot, name, kind, required)


def instantiate(spec: ToolSpec, values: Values, rng: Random) -> Tool:
    """Return one variant of a hand-written tool."""
    vary = values.split == "train"
    used: set[str] = set()
    parameters = []
    for arg in spec.args:
        names = [name for name in arg.names if name not in used]
        name = rng.choice(names) if vary and rng.random() < 0.6 else names[0]
        used.add(name)
        parameters.append(make_parameter(arg.slot, name, arg.kind, not arg.optional, values, rng))
    if vary and rng.random() < 0.2:
        rng.shuffle(parameters)
    name = restyle(rng.choice(spec.names), rng) if vary else spec.names[0]
    about = finish_about(rng.choice(spec.abouts), rng) if vary else spec.abouts[0] + "."
    return Tool(name, about, tuple(parameters), spec.asks, spec.gives, lists_required=not vary or rng.random() < 0.75)


def restyle(name: str, rng: Random) -> str:
    """Return a function name in snake case, or sometimes in another style."""
    chance = rng.random()
    if chance < 0.1:
        head, *tail = name.split("_")
        return head + "".join(part.capitalize() for part in tail)
    if chance < 0.13:
        return name.replace("_", "-")
    if chance < 0.16:
        return "".join(part.capitalize() for part in name.split("_"))
    return name


def finish_about(about: str, rng: Random) -> str:
    """Return a description with or without a full stop, or sometimes an empty one."""
    chance = rng.random()
    if chance < 0.06:
        return ""
    return about + "." if chance < 0.5 else about


def slots_used(ask: str) -> set[str]:
    """Return the slots of a request."""
    return set(slots_of(ask))

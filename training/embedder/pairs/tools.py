"""Requests for tools with the descriptions of the tools, and requests that ask for the same call."""

from __future__ import annotations

import json
from functools import cache
from random import Random

from training.embedder.pairs.pair import Pair, same
from training.generators.synthetic_tools import make_tool
from training.generators.tool_calls import call_turn, make_value
from training.generators.tool_specs import Tool, ToolSpec, heldout_requests, instantiate, read_specs, slots_used
from training.grammar import draw, fill
from training.noise import add_noise
from training.values import Values

SYNTHETIC_RATE = 0.15
VALUES = {split: Values(split) for split in ("train", "heldout")}


def describe(tool: Tool, rng: Random | None = None) -> str:
    """Return a description of a tool; without ``rng`` in the form that the evaluation uses."""
    about = tool.about.rstrip(".")
    plain = f"{tool.name}: {about}" if about else tool.name
    if rng is None:
        return plain
    words = tool.name.replace("_", " ").replace("-", " ")
    names = ", ".join(parameter.name for parameter in tool.parameters)
    forms = [plain, plain, about or words, f"{words}. {about}", f"{tool.name}({names}) {about}"]
    if rng.random() < 0.12:
        return json.dumps(tool.openai()["function"])
    return rng.choice(forms).strip()


def tool_request(rng: Random, split: str) -> Pair:
    """Return a request and the description of the tool that it needs."""
    values = VALUES[split]
    if split == "train" and rng.random() < SYNTHETIC_RATE:
        tool = make_tool(values, rng)
        return same(call_turn(rng, values, tool).user, describe(tool, rng), [f"tool {tool.name}"])
    spec = rng.choice(read_specs("train") if split == "train" else heldout_requests())
    tool = instantiate(spec, values, rng)
    shown = describe(tool, rng if split == "train" else None)
    return same(call_turn(rng, values, tool).user, shown, [f"tool {spec.names[0]}"])


def tool_wording(rng: Random, split: str) -> Pair:
    """Return two requests for the same call; the wrong text is the same request with other values."""
    values = VALUES[split]
    spec, asks = rng.choice(_with_rewordings(split))
    tool = instantiate(spec, values, rng)
    first, second = rng.sample(asks, 2)
    shown, other = (_shown(tool, rng, values) for _ in range(2))
    query, text = (add_noise(draw(ask, rng), rng, split) for ask in (first, second))
    negative = fill(text, other)
    marks = [f"{spec.names[0]} {slot} {shown[slot]}" for slot in sorted(slots_used(first))]
    filled = fill(text, shown)
    return same(fill(query, shown), filled, marks, negative if negative != filled else "")


@cache
def _with_rewordings(split: str) -> tuple[tuple[ToolSpec, tuple[str, ...]], ...]:
    """Return groups of requests with the same slots."""
    groups = []
    for spec in read_specs("train") if split == "train" else heldout_requests():
        by_slots: dict[frozenset[str], list[str]] = {}
        for ask in spec.asks:
            by_slots.setdefault(frozenset(slots_used(ask)), []).append(ask)
        groups += [(spec, tuple(asks)) for slots, asks in by_slots.items() if slots and len(asks) > 1]
    return tuple(groups)


def _shown(tool: Tool, rng: Random, values: Values) -> dict[str, str]:
    return {parameter.slot: str(make_value(parameter, rng, values)).replace("_", " ") for parameter in tool.parameters}

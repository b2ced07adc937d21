"""Requests that need a tool, tool calls, tool results, and the answers to the user."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from training.generators.arithmetic import in_words
from training.generators.synthetic_tools import RESULT_KEYS, RESULT_KINDS, make_family, make_tool
from training.generators.tool_names import draw_word, rename_tool
from training.generators.tool_specs import NUM_COMMON_TOOLS, Parameter, Tool, instantiate, read_specs, slots_used
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import add_noise
from training.values import Values

BARE_KINDS = ("path", "url", "email", "code", "command", "sql", "expression", "handle", "digits", "ticker")
DOUBLE_STOP = re.compile(r"(?<=\d)\.\.(?!\.)")
FAMILY_RATE = 0.08
SYNTHETIC_RATE = 0.1
RENAMED_RATE = 0.12
COMMON_TOOL_RATE = 0.95  # share of the common tools among hand-written ones
ERRORS = ("not found", "no access", "timeout", "invalid value", "service unavailable", "unknown id", "quota exceeded")
Json = Any


def make_tools(rng: Random, values: Values, count: int) -> list[Tool]:
    """Return tools for one conversation, with distinct names; some are similar to each other."""
    train = values.split == "train"
    if train and count > 1 and rng.random() < FAMILY_RATE:
        return _family(rng, values, count)
    tools: list[Tool] = []
    names: set[str] = set()
    while len(tools) < count:
        tool = _any_tool(rng, values, tools)
        known = train and any(tool.asks == other.asks for other in tools)
        if tool.name.lower() not in names and not known and (train or len(tool.parameters) > 0):
            names.add(tool.name.lower())
            tools.append(tool)
    return tools


def _family(rng: Random, values: Values, count: int) -> list[Tool]:
    """Return similar synthetic tools; sometimes one of them is replaced by an unrelated tool."""
    while True:
        tools = make_family(values, rng, count)
        if rng.random() < 0.3:
            tools[rng.randrange(count)] = _any_tool(rng, values, [])
        if len({tool.name.lower() for tool in tools}) == count:
            return rng.sample(tools, count)


def _any_tool(rng: Random, values: Values, others: list[Tool]) -> Tool:
    if values.split == "train":
        if rng.random() < SYNTHETIC_RATE:
            return make_tool(values, rng)
        tool = _written_tool(rng, values, others)
        return rename_tool(tool, values, rng) if rng.random() < RENAMED_RATE else tool
    return _written_tool(rng, values, others)


def _written_tool(rng: Random, values: Values, others: list[Tool]) -> Tool:
    specs = read_specs(values.split)
    if others and rng.random() < 0.3:
        parts = set(others[-1].name.split("_"))
        near = [spec for spec in specs if parts & set(spec.names[0].split("_"))]
        return instantiate(rng.choice(near or list(specs)), values, rng)
    common = values.split == "train" and rng.random() < COMMON_TOOL_RATE
    return instantiate(rng.choice(specs[:NUM_COMMON_TOOLS] if common else specs), values, rng)


def call_turn(rng: Random, values: Values, tool: Tool) -> Turn:
    """Return a turn with a request for the tool, and the tool call."""
    ask = draw(rng.choice(tool.asks), rng)
    used = slots_used(ask)
    arguments: dict[str, Json] = {}
    shown: dict[str, str] = {}
    for parameter in tool.parameters:
        if parameter.slot in used:
            value = make_value(parameter, rng, values)
            arguments[parameter.name], shown[parameter.slot] = value, _as_user_text(value, parameter, rng, values)
    last = next((p for p in tool.parameters if ask.endswith(f"{{{p.slot}}}")), None)
    bare = last is not None and (last.kind.split()[0] in BARE_KINDS or rng.random() < 0.5)
    user = fill(add_noise(ask, rng, values.split, end=not bare), shown)
    if values.split == "train":
        user = DOUBLE_STOP.sub(".", user)
    call = {"name": tool.name, "arguments": arguments}
    return Turn("tool_call", user, call=call, expect={"call": call})


def missing_turn(rng: Random, values: Values, tool: Tool) -> Turn | None:
    """Return a turn whose request lacks the required values, so the model asks for them; None if there are none."""
    required = {parameter.slot: parameter for parameter in tool.parameters if parameter.required}
    stem = tool.name.replace("_", " ").replace("-", " ").lower()
    if not tool.lists_required or not required or any(letter.isupper() for letter in tool.name):
        return None
    user = add_noise(rng.choice(("{t}", "i want to {t}", "can you {t}", "please {t}", "{t} for me")), rng, values.split)
    names = [parameter.name.replace("_", " ") for parameter in required.values()]
    return Turn("tool_missing", fill(user, {"t": stem}), f"Please tell me the {and_list(names)}.")


def result_turn(rng: Random, values: Values, tool: Tool, call: dict[str, Any]) -> Turn:
    """Return a turn with a tool result and the answer to the user; it has no user message."""
    content, reply, shown = make_result(rng, values, tool)
    before = ({"role": "tool", "content": content, "tool_call_id": "call_1", "name": tool.name},)
    return Turn("tool_answer", "", reply, expect={"shown": shown}, before=before)


def make_result(rng: Random, values: Values, tool: Tool) -> tuple[str, str, list[str]]:
    """Return a tool result, the answer, and the values that the answer must contain."""
    chance = rng.random()
    if chance < 0.06:
        error = rng.choice(ERRORS) if rng.random() < 0.7 else f"{values.draw('thing', rng)} {rng.choice(ERRORS)}"
        return dump({"error": error}), f"That did not work: {error}.", [error]
    if chance < 0.16:
        text = str(values.draw(rng.choice(("sentence", "thing", "int 1 999", "query", "city", "time")), rng))
        return text, f"The result is {text}.", [text]
    if chance < 0.24:
        text = str(values.draw("sentence", rng)).capitalize() + "."
        return text, text, [text.rstrip(".")]
    gives = tool.gives if rng.random() < 0.55 else _random_result_fields(rng)
    if values.split == "train" and rng.random() < 0.3:
        gives = tuple((draw_word(values, rng), kind) for _, kind in gives)
    result = {key: _result_value(kind, rng, values) for key, kind in gives}
    content = dump({"result": result} if chance < 0.3 and "result" not in result else result)
    return content, describe(result), [piece for value in result.values() for piece in _shown_values(value)]


def _random_result_fields(rng: Random) -> tuple[tuple[str, str], ...]:
    return tuple((rng.choice(RESULT_KEYS), rng.choice(RESULT_KINDS)) for _ in range(rng.randint(1, 3)))


def _result_value(kind: str, rng: Random, values: Values) -> Json:
    return values.draw(kind, rng)


def describe(result: dict[str, Json]) -> str:
    """Describe a result in a sentence: The temperature is 21 and the condition is sunny."""
    text = and_list([_describe_field(key.replace("_", " "), value) for key, value in result.items()])
    return text[0].upper() + text[1:] + "."


def _describe_field(key: str, value: Json) -> str:
    if isinstance(value, bool):
        return f"it is {key}" if value else f"it is not {key}"
    if isinstance(value, list):
        return f"the {key} are {and_list([str(item) for item in value])}"
    plural = key.endswith("s") and not key.endswith(("ss", "us", "is"))
    return f"the {key} {'are' if plural else 'is'} {value}"


def _shown_values(value: Json) -> list[str]:
    if isinstance(value, bool):
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def and_list(items: list[str]) -> str:
    """Join items: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def dump(value: Json) -> str:
    """Return JSON in one line, as the chat template writes it."""
    return json.dumps(value, ensure_ascii=False)


def make_value(parameter: Parameter, rng: Random, values: Values) -> Json:
    """Draw a value for a parameter."""
    if parameter.options:
        return rng.choice(parameter.options)
    return values.draw(parameter.kind, rng)


def _as_user_text(value: Json, parameter: Parameter, rng: Random, values: Values) -> str:
    if parameter.options:
        text = str(value).replace("_", " ")
        return text.capitalize() if values.split == "train" and text.islower() and rng.random() < 0.04 else text
    if isinstance(value, int) and value <= 20 and values.split == "train" and rng.random() < 0.1:
        return in_words(value)
    return str(value)

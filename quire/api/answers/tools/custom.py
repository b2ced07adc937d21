"""Custom tools, which take a text: to the model each is a function with that text as its one argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import FunctionTool
from quire.api.protocol.custom import CustomTool, GrammarFormat

INPUT = "input"  # the argument


def schema_of(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """Schema of a tool's arguments.

    Raises:
        InvalidRequest: they cannot be held to what the tool asks for.
    """
    if isinstance(tool, FunctionTool):
        return tool.function.parameters or {"type": "object"}
    text = {"type": "string"}
    if isinstance(tool.custom.format, GrammarFormat):
        grammar = tool.custom.format.grammar
        if grammar.syntax != "regex":  # llguidance can write no Lark grammar in JSON's escapes
            raise InvalidRequest(
                f"The `format` of the tool {tool.name!r} is a {grammar.syntax} grammar; only a `regex` is supported.",
                "tools",
            )
        text["pattern"] = f"^(?:{grammar.definition})$"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def is_strict(tool: FunctionTool | CustomTool) -> bool:
    """Whether its arguments are held to their schema wherever it is called."""
    if isinstance(tool, FunctionTool):
        return bool(tool.function.strict)
    return isinstance(tool.custom.format, GrammarFormat)


def as_function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """A tool as its chat template is given it."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump(exclude_unset=True)
    about = {} if tool.custom.description is None else {"description": tool.custom.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": schema_of(tool)}}


def as_function_call(call: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """A call of an earlier turn as its chat template is given it.

    Raises:
        InvalidRequest: a custom tool's lacks its name or its input.
    """
    if call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict) or not all(isinstance(custom.get(key), str) for key in ("name", INPUT)):
        raise InvalidRequest("A call of a custom tool needs `custom` with a `name` and an `input`.", param)
    function = {"name": custom["name"], "arguments": json.dumps({INPUT: custom[INPUT]}, ensure_ascii=False)}
    return {**{key: value for key, value in call.items() if key != "custom"}, "type": "function", "function": function}

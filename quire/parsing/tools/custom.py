"""Custom tools, whose input is plain text: the model sees each as a function with one string argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.protocol import fields
from quire.protocol.chat import FunctionTool
from quire.protocol.custom import CustomTool, GrammarFormat
from quire.protocol.errors import InvalidRequest

INPUT = "input"  # the argument


def schema_of(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """JSON schema of a tool's arguments.

    Raises:
        InvalidRequest: the tool's `format` is not supported.
    """
    if isinstance(tool, FunctionTool):
        parameters = tool.function.parameters or {}
        # Without a type, `properties` would allow arguments that are no objects.
        return {"type": "object", **parameters} if not parameters or "properties" in parameters else parameters
    text = {"type": "string"}
    if isinstance(tool.custom.format, GrammarFormat):
        grammar = tool.custom.format.grammar
        if grammar.syntax != "regex":  # llguidance cannot constrain an escaped JSON string to a Lark grammar
            raise InvalidRequest(
                f"The `format` of the tool {tool.name!r} is a {grammar.syntax} grammar; only a `regex` is supported.",
                "tools",
            )
        text["pattern"] = f"^(?:{grammar.definition})$"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def is_strict(tool: FunctionTool | CustomTool) -> bool:
    """Return whether its arguments must match their schema even if no call is required."""
    if isinstance(tool, FunctionTool):
        return bool(tool.function.strict)
    return isinstance(tool.custom.format, GrammarFormat)


def as_function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """The tool as it is passed to the chat template."""
    if isinstance(tool, FunctionTool):
        return {**fields.set_fields(tool), "function": fields.set_fields(tool.function)}
    about = {} if tool.custom.description is None else {"description": tool.custom.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": schema_of(tool)}}


def as_function_call(call: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """A call of an earlier turn as it is passed to the chat template.

    Raises:
        InvalidRequest: the call of a custom tool has no name or no input.
    """
    if call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict) or not all(isinstance(custom.get(key), str) for key in ("name", INPUT)):
        raise InvalidRequest("A call of a custom tool needs `custom` with a `name` and an `input`.", param)
    function = {"name": custom["name"], "arguments": json.dumps({INPUT: custom[INPUT]}, ensure_ascii=False)}
    return {**{key: value for key, value in call.items() if key != "custom"}, "type": "function", "function": function}

"""The tools that the model may use at the end of a conversation."""

from __future__ import annotations

from collections.abc import Iterator

from quire.protocol.anthropic import (
    Conversation,
    DefinedTool,
    NamedTool,
    ToolAddition,
    ToolDefinition,
    ToolReference,
    ToolRemoval,
    ToolResultBlock,
)
from quire.protocol.errors import InvalidRequest


def offered_tools(body: Conversation) -> list[ToolDefinition]:
    """The tools without those that are deferred, or were withdrawn by a message.

    A deferred tool is offered once the result of a search refers to it or a message adds it.

    Raises:
        InvalidRequest: a message refers to a tool that is not known.
    """
    known = {tool.name: tool for tool in body.tools or ()}
    offered = {tool.name for tool in body.tools or () if not tool.defer_loading}
    defined = list(body.tools or ())
    for path, block in _changes(body):
        match block:
            case ToolAddition(tool=DefinedTool(definition=tool)):
                if tool.name not in known:
                    defined.append(tool)
                known[tool.name] = tool
                offered.add(tool.name)
            case ToolAddition(tool=NamedTool(name=name)):
                _check_known(name, known, f"{path}.tool.name")
                offered.add(name)
            case ToolRemoval(tool=NamedTool(name=name)):
                _check_known(name, known, f"{path}.tool.name")
                offered.discard(name)
            case ToolReference(tool_name=name):
                _check_known(name, known, f"{path}.tool_name")
                offered.add(name)
    return [known[tool.name] for tool in defined if tool.name in offered]


def _changes(body: Conversation) -> Iterator[tuple[str, ToolAddition | ToolRemoval | ToolReference]]:
    """The blocks that change what is offered, each with its path."""
    for index, turn in enumerate(body.messages):
        for number, block in enumerate(() if isinstance(turn.content, str) else turn.content):
            path = f"messages[{index}].content[{number}]"
            if isinstance(block, ToolAddition | ToolRemoval):
                yield path, block
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for place, part in enumerate(block.content):
                    if isinstance(part, ToolReference):
                        yield f"{path}.content[{place}]", part


def _check_known(name: str, known: dict[str, ToolDefinition], path: str) -> None:
    if name not in known:
        raise InvalidRequest(f"The tool {name!r} is not one of the `tools`.", path)

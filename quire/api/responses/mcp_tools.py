"""The built-in tools of a response: what its model is offered of them from turn to turn, and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.http.errors import InvalidRequest
from quire.api.mcp.outcome import CallOutcome, arguments_of, protocol_error, result_text
from quire.api.mcp.servers import OfferedTools
from quire.api.protocol.mcp import ChosenMcpTool, McpCall, McpListTools, McpTool
from quire.api.protocol.responses import (
    AllowedResponseTools,
    ChosenTool,
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    ResponsesRequest,
    ResponseTool,
)
from quire.api.responses.turns import Allowance
from quire.engine.wire.client import EngineClient

_REFUSED = -32000  # JSON-RPC leaves such codes to whoever answers
_ID_LENGTH = 9  # Mistral's templates take no other


def named_servers(body: ResponsesRequest) -> list[tuple[int, McpTool]]:
    """The servers that a request names, with their places in its `tools`."""
    return [(place, tool) for place, tool in enumerate(body.tools or ()) if isinstance(tool, McpTool)]


@dataclass(slots=True)
class BuiltInTools:
    """What one response may call itself.

    Attributes:
        offered: servers and their tools.
        left: how many calls may still be made, if there is a limit.
        refused: a call came when none was left.
        allowed: names of the tools that `tool_choice` leaves to the model; none if it leaves all.
    """

    offered: Sequence[OfferedTools]
    left: int | None = None
    refused: bool = False
    allowed: frozenset[str] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Each tool's server, by the tool's name."""
        return {tool.name: server.label for server in self.offered for tool in server.tools}

    def lists(self, before: Iterable[Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Labels and tools of the lists to tell: those that the conversation does not hold just so."""
        held = {item.server_label: item.tools for item in before if isinstance(item, McpListTools)}
        for server in self.offered:
            tools = [tool.told() for tool in server.tools]
            if held.get(server.label) != tools:
                yield server.label, tools

    def request(self, body: ResponsesRequest) -> ResponsesRequest:
        """The request as if all tools were functions: for the first turn.

        Raises:
            InvalidRequest: names are not clear, or a chosen tool is not offered.
        """
        choice = self._choice(body.tool_choice)
        if not self.offered:
            return body.model_copy(update={"tool_choice": choice})
        if body.tool_choice == "none":
            self.allowed = frozenset()
        elif isinstance(body.tool_choice, AllowedResponseTools):
            self.allowed = frozenset(tool.name for tool in choice.tools)
        self._check_names(body)
        tools = [tool for tool in body.tools or () if not isinstance(tool, McpTool)]
        tools += [
            ResponseTool(type="function", name=tool.name, description=tool.description, parameters=tool.schema)
            for server in self.offered
            for tool in server.tools
        ]
        return body.model_copy(update={"tools": tools, "tool_choice": choice})

    def _check_names(self, body: ResponsesRequest) -> None:
        own = (tool for tool in body.tools or () if not isinstance(tool, McpTool))
        owners = {tool.name: "a tool of the request" for tool in own}
        for server in self.offered:
            for tool in server.tools:
                if tool.name in owners:
                    raise InvalidRequest(
                        f"{tool.name!r} of MCP server {server.label!r} is also the name of {owners[tool.name]}; "
                        "`allowed_tools` can leave one out.",
                        "tools",
                    )
                owners[tool.name] = f"a tool of MCP server {server.label!r}"

    def _choice(self, choice: Any) -> Any:
        match choice:
            case ChosenMcpTool(name=None):
                return AllowedResponseTools(type="allowed_tools", mode="required", tools=list(self._chosen(choice)))
            case ChosenMcpTool():
                return next(self._chosen(choice))
            case AllowedResponseTools():
                tools = [
                    one
                    for tool in choice.tools
                    for one in (self._chosen(tool) if isinstance(tool, ChosenMcpTool) else (tool,))
                ]
                return choice.model_copy(update={"tools": tools})
        return choice

    def _chosen(self, choice: ChosenMcpTool) -> Iterator[ChosenTool]:
        names = [name for name, label in self.labels.items() if label == choice.server_label]
        names = [name for name in names if choice.name in (None, name)]
        if not names:
            what = f"tool {choice.name!r} of MCP server" if choice.name else "tools of MCP server"
            raise InvalidRequest(
                f"`tool_choice` names {what} {choice.server_label!r}, which the `tools` do not offer.", "tool_choice"
            )
        for name in names:
            yield ChosenTool(type="function", name=name)

    async def carry_out(
        self, calls: Sequence[dict[str, Any]], allowance: Allowance, engine: EngineClient
    ) -> AsyncGenerator[tuple[dict[str, Any], CallOutcome], None]:
        """Make calls side by side; gives them with what came of them, in their order. Closing it early ends them.

        Raises:
            DeadlineExceeded: the response's time is up.
            EngineDead: nobody could go on after the calls.
        """
        tasks = [asyncio.create_task(self._made(call)) for call in calls]
        died = asyncio.create_task(engine.died())
        try:
            for call, task in zip(calls, tasks, strict=True):
                async with allowance.in_time():
                    await asyncio.wait((task, died), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    await died
                yield call, task.result()
        finally:
            for waiting in (*tasks, died):
                waiting.cancel()
            await asyncio.gather(*tasks, died, return_exceptions=True)

    async def _made(self, call: dict[str, Any]) -> CallOutcome:
        """What comes of a call, or of none, if it may not be made."""
        if self.allowed is not None and call["name"] not in self.allowed:
            return CallOutcome(error=protocol_error(_REFUSED, "Not called: `tool_choice` does not allow it."))
        if self.left == 0:
            self.refused = True
            return CallOutcome(error=protocol_error(_REFUSED, "Not called: `max_tool_calls` is reached."))
        if self.left is not None:
            self.left -= 1
        server = next(server for server in self.offered if server.label == call["server_label"])
        return await server.call(call["name"], call["arguments"])


def later(body: ResponsesRequest) -> ResponsesRequest:
    """The request of a turn behind the first: a choice that was forced would be so for ever."""
    choice = body.tool_choice
    if isinstance(choice, AllowedResponseTools):
        choice = choice.model_copy(update={"mode": "auto"})
    elif choice != "none":
        choice = None
    return body.model_copy(update={"tool_choice": choice, "max_output_tokens": None, "min_tokens": 0})


def plain_calls(items: Iterable[Any]) -> Iterator[Any]:
    """Items as if all tools were functions: a call that was made here becomes one and its result.

    Between calls of the client's, whose results come later, results wait until all calls have been told.
    """
    waiting: list[FunctionCallOutput] = []
    among_others = False
    for item in items:
        if isinstance(item, McpListTools):
            continue
        if isinstance(item, McpCall):
            call, output = _plain(item)
            yield call
            waiting.append(output)
        else:
            among_others = isinstance(item, FunctionCall | CustomToolCall)
        if not among_others:
            yield from waiting
            waiting.clear()
        if not isinstance(item, McpCall):
            yield item
    yield from waiting


def plain_turn(items: Iterable[Any]) -> Iterator[Any]:
    """The same for one turn of the model: results come behind all that it said, as it did not know them yet."""
    outputs = []
    for item in items:
        if isinstance(item, McpCall):
            call, output = _plain(item)
            yield call
            outputs.append(output)
        else:
            yield item
    yield from outputs


def _plain(item: McpCall) -> tuple[FunctionCall, FunctionCallOutput]:
    call_id = item.id[-_ID_LENGTH:]
    arguments = "{}" if arguments_of(item.arguments) is None else item.arguments
    output = result_text(item.output, item.error)
    return (
        FunctionCall(type="function_call", call_id=call_id, name=item.name, arguments=arguments),
        FunctionCallOutput(type="function_call_output", call_id=call_id, output=output),
    )

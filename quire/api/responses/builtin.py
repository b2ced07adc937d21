"""The built-in tools of a response: what its model is offered of them from turn to turn, and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.errors import InvalidRequest
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
    """

    offered: Sequence[OfferedTools]
    left: int | None = None
    refused: bool = False

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
        if not self.offered:
            return body
        self._check_names(body)
        tools = [tool for tool in body.tools or () if not isinstance(tool, McpTool)]
        tools += [
            ResponseTool(type="function", name=tool.name, description=tool.description, parameters=tool.schema)
            for server in self.offered
            for tool in server.tools
        ]
        return body.model_copy(update={"tools": tools, "tool_choice": self._choice(body.tool_choice)})

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
        self, calls: Sequence[dict[str, Any]], allowance: Allowance
    ) -> AsyncGenerator[tuple[dict[str, Any], CallOutcome], None]:
        """Make calls side by side; gives them with what came of them, in their order. Closing it early ends them.

        Raises:
            DeadlineExceeded: the response's time is up.
        """
        most = len(calls) if self.left is None else min(self.left, len(calls))
        if self.left is not None:
            self.left -= most
        self.refused = self.refused or most < len(calls)
        servers = {server.label: server for server in self.offered}
        tasks = [
            asyncio.create_task(servers[call["server_label"]].call(call["name"], call["arguments"]))
            for call in calls[:most]
        ]
        try:
            for call, task in zip(calls, tasks, strict=False):
                async with allowance.in_time():
                    outcome = await task
                yield call, outcome
            for call in calls[most:]:
                yield call, CallOutcome(error=protocol_error(_REFUSED, "Not called: `max_tool_calls` is reached."))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


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
            call_id = item.id[-_ID_LENGTH:]
            arguments = "{}" if arguments_of(item.arguments) is None else item.arguments
            yield FunctionCall(type="function_call", call_id=call_id, name=item.name, arguments=arguments)
            output = result_text(item.output, item.error)
            waiting.append(FunctionCallOutput(type="function_call_output", call_id=call_id, output=output))
        else:
            among_others = isinstance(item, FunctionCall | CustomToolCall)
        if not among_others:
            yield from waiting
            waiting.clear()
        if not isinstance(item, McpCall):
            yield item
    yield from waiting

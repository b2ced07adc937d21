"""The tools of MCP servers in a response: how they are offered to the model from turn to turn, and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.mcp.servers import OfferedTools
from quire.api.mcp.types import CallOutcome, arguments_of, protocol_error, result_text
from quire.api.responses.limits import ResponseLimits
from quire.engine.client.engine import Engine
from quire.protocol.errors import InvalidRequest
from quire.protocol.mcp import ChosenMcpTool, McpCall, McpListTools, McpTool
from quire.protocol.responses import (
    AllowedResponseTools,
    ChosenTool,
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    ResponsesRequest,
    ResponseTool,
)

_REFUSED = -32000  # in the range that JSON-RPC leaves to servers
_CALL_ID_LENGTH = 9  # Mistral's templates accept no other


def mcp_servers_in(body: ResponsesRequest) -> list[tuple[int, McpTool]]:
    """The MCP servers of a request, with their indices in its `tools`."""
    return [(index, tool) for index, tool in enumerate(body.tools or ()) if isinstance(tool, McpTool)]


@dataclass(slots=True)
class McpToolset:
    """The MCP tools of one response.

    Attributes:
        offered: servers and their tools.
        calls_left: number of calls that may still be made; None if `max_tool_calls` is not set.
        limit_reached: a call was refused because of `max_tool_calls`.
        allowed: names of the tools that `tool_choice` allows; None if it allows all.
    """

    offered: Sequence[OfferedTools]
    calls_left: int | None = None
    limit_reached: bool = False
    allowed: frozenset[str] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the servers, by the names of their tools."""
        return {tool.name: server.label for server in self.offered for tool in server.tools}

    def new_lists(self, before: Iterable[Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Labels and tools of the servers whose current lists are not in the conversation."""
        known = {item.server_label: item.tools for item in before if isinstance(item, McpListTools)}
        for server in self.offered:
            tools = [tool.to_json() for tool in server.tools]
            if known.get(server.label) != tools:
                yield server.label, tools

    def first_request(self, body: ResponsesRequest) -> ResponsesRequest:
        """The request of the first turn, in which MCP tools are functions.

        Raises:
            InvalidRequest: two tools have the same name, or a chosen tool is not offered.
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
        functions = (tool for tool in body.tools or () if not isinstance(tool, McpTool))
        owners = {tool.name: "a tool of the request" for tool in functions}
        for server in self.offered:
            for tool in server.tools:
                if tool.name in owners:
                    raise InvalidRequest(
                        f"{tool.name!r} of MCP server {server.label!r} is also the name of {owners[tool.name]}; "
                        "leave one of them out with `allowed_tools`.",
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
                    allowed
                    for tool in choice.tools
                    for allowed in (self._chosen(tool) if isinstance(tool, ChosenMcpTool) else (tool,))
                ]
                return choice.model_copy(update={"tools": tools})
        return choice

    def _chosen(self, choice: ChosenMcpTool) -> Iterator[ChosenTool]:
        offered = next((server.tools for server in self.offered if server.label == choice.server_label), ())
        names = [tool.name for tool in offered if choice.name in (None, tool.name)]
        if not names:
            description = f"tool {choice.name!r} of MCP server" if choice.name else "tools of MCP server"
            raise InvalidRequest(
                f"`tool_choice` names {description} {choice.server_label!r}, but `tools` does not contain them.",
                "tool_choice",
            )
        for name in names:
            yield ChosenTool(type="function", name=name)

    async def run_calls(
        self, calls: Sequence[dict[str, Any]], limits: ResponseLimits, engine: Engine
    ) -> AsyncGenerator[tuple[dict[str, Any], CallOutcome], None]:
        """Make calls concurrently and give each with its outcome, in order. Closing the generator early cancels them.

        Raises:
            DeadlineExceeded: the timeout of the response has passed.
            EngineDead: the engine has ended, so that no turn could follow.
        """
        tasks = [asyncio.create_task(self._call(call)) for call in calls]
        engine_dead = asyncio.create_task(engine.wait_until_dead())
        try:
            for call, task in zip(calls, tasks, strict=True):
                async with limits.deadline.enforced():
                    await asyncio.wait((task, engine_dead), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    await engine_dead
                yield call, task.result()
        finally:
            for unfinished in (*tasks, engine_dead):
                unfinished.cancel()
            await asyncio.gather(*tasks, engine_dead, return_exceptions=True)

    async def _call(self, call: dict[str, Any]) -> CallOutcome:
        """The outcome of a call, which may be that it was refused."""
        if self.allowed is not None and call["name"] not in self.allowed:
            return CallOutcome(error=protocol_error(_REFUSED, "Not called: `tool_choice` does not allow it."))
        if self.calls_left == 0:
            self.limit_reached = True
            return CallOutcome(error=protocol_error(_REFUSED, "Not called: `max_tool_calls` is reached."))
        if self.calls_left is not None:
            self.calls_left -= 1
        server = next(server for server in self.offered if server.label == call["server_label"])
        return await server.call(call["name"], call["arguments"])


def follow_up_request(body: ResponsesRequest) -> ResponsesRequest:
    """The request of later turns: they are not forced to call a tool, as the response would never end."""
    choice = body.tool_choice
    if isinstance(choice, AllowedResponseTools):
        choice = choice.model_copy(update={"mode": "auto"})
    elif choice != "none":
        choice = None
    return body.model_copy(update={"tool_choice": choice, "max_output_tokens": None, "min_tokens": 0})


def without_pictures(items: Iterable[dict[str, Any]], reason: str) -> bool:
    """Take pictures out of calls whose results cannot be prepared, and say why. Returns whether there were any."""
    seen = False
    for item in items:
        if item["type"] == "mcp_call" and item.pop("content", None) is not None:
            item["output"] = f"{item['output']}\n[Its pictures cannot be read: {reason}]"
            seen = True
    return seen


def as_function_calls(items: Iterable[Any]) -> Iterator[Any]:
    """Items in which each MCP call is a function call and its result.

    Among calls that the client makes, results follow after all calls.
    """
    outputs: list[FunctionCallOutput] = []
    among_client_calls = False
    for item in items:
        if isinstance(item, McpListTools):
            continue
        if isinstance(item, McpCall):
            call, output = _function_call(item)
            yield call
            outputs.append(output)
        else:
            among_client_calls = isinstance(item, FunctionCall | CustomToolCall)
        if not among_client_calls:
            yield from outputs
            outputs.clear()
        if not isinstance(item, McpCall):
            yield item
    yield from outputs


def turn_as_function_calls(items: Iterable[Any]) -> Iterator[Any]:
    """The same for the output of one turn: results follow at its end, as the model did not know them before."""
    outputs = []
    for item in items:
        if isinstance(item, McpCall):
            call, output = _function_call(item)
            yield call
            outputs.append(output)
        else:
            yield item
    yield from outputs


def _function_call(item: McpCall) -> tuple[FunctionCall, FunctionCallOutput]:
    call_id = item.id[-_CALL_ID_LENGTH:]
    arguments = "{}" if arguments_of(item.arguments) is None else item.arguments
    output = item.content or result_text(item.output, item.error)
    return (
        FunctionCall(type="function_call", call_id=call_id, name=item.name, arguments=arguments),
        FunctionCallOutput(type="function_call_output", call_id=call_id, output=output),
    )

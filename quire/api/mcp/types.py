"""Types of MCP: servers, tools, and results of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from quire.protocol.errors import FailedDependency
from quire.protocol.strict_json import parse_json
from quire.workers.shares import Shares

INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603  # JSON-RPC's codes


@dataclass(frozen=True, slots=True)
class McpServer:
    """Address of an MCP server.

    Attributes:
        headers: HTTP headers from the client's request.
        timeout: seconds that a list or a call may take.
        max_answer_size: bytes that the server may send for it.
        memory: bytes that all servers may send at once.
    """

    url: str
    headers: Mapping[str, str]
    timeout: float
    max_answer_size: int
    memory: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTool:
    """A tool of an MCP server.

    Attributes:
        schema: JSON schema of its arguments.
        annotations: the server's hints, `readOnlyHint` among them.
    """

    name: str
    description: str | None
    schema: dict[str, Any]
    annotations: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The tool in an `mcp_list_tools` item."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": self.schema,
            "annotations": self.annotations,
        }


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call: an output, or an error in one of the three forms of OpenAI's API.

    Attributes:
        content: the output as content parts of a response's input, if it has pictures.
    """

    output: str | None = None
    error: dict[str, Any] | None = None
    content: list[dict[str, Any]] | None = None


def tool_error(texts: list[str]) -> CallOutcome:
    """The outcome of a tool that ran and reported an error."""
    content = [{"type": "text", "text": text} for text in texts]
    return CallOutcome(error={"type": "mcp_tool_execution_error", "content": content})


def protocol_error(code: int, message: str) -> dict[str, Any]:
    """The error of a call that was refused. `code`: error code of JSON-RPC."""
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def http_error(code: int, message: str) -> dict[str, Any]:
    """The error of a server that could not be reached. `code`: an HTTP status."""
    return {"type": "http_error", "code": code, "message": message}


def arguments_of(text: str) -> dict[str, Any] | None:
    """A call's arguments; None if the text is not a JSON object. An empty text means no arguments."""
    try:
        parse_json(text or "{}")  # refuses NaN and deep nesting, but converts long integers to floats
        arguments = json.loads(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def result_text(output: str | None, error: Any) -> str:
    """The result of a call as text for the model; the call may come from the client."""
    if error is None:
        return "There is no result of this call." if output is None else output
    message: Any = error
    if isinstance(error, dict):
        message = error.get("message") or error.get("content")
        if isinstance(message, list) and all(isinstance(part, dict) and "text" in part for part in message):
            message = "\n".join(str(part["text"]) for part in message)
    return f"Error: {message if isinstance(message, str) else orjson.dumps(message).decode()}"


class ToolServerFailed(FailedDependency):
    """An MCP server cannot be reached, did not answer in time, or violated the protocol.

    Attributes:
        detail: the `error` of an `mcp_call` item.
    """

    def __init__(self, detail: dict[str, Any], message: str | None = None) -> None:
        super().__init__(message or str(detail["message"]), "tools")
        self.detail = detail

"""Where tools are, what they are, and what comes of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server.

    Attributes:
        headers: from the request, for those to the server.
        patience: seconds that a list or a call may take.
    """

    url: str
    headers: Mapping[str, str]
    patience: float


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

    def told(self) -> dict[str, Any]:
        """As it stands in an `mcp_list_tools` item."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": self.schema,
            "annotations": self.annotations,
        }


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of a call: an output, or an error in one of OpenAI's three shapes."""

    output: str | None = None
    error: dict[str, Any] | None = None


def tool_error(texts: list[str]) -> CallOutcome:
    """The tool ran, and failed in these words."""
    content = [{"type": "text", "text": text} for text in texts]
    return CallOutcome(error={"type": "mcp_tool_execution_error", "content": content})


def protocol_error(code: int, message: str) -> dict[str, Any]:
    """The call was refused; `code` is one of JSON-RPC's."""
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def http_error(code: int, message: str) -> dict[str, Any]:
    """The server was not reached; `code` is like an HTTP status."""
    return {"type": "http_error", "code": code, "message": message}


def arguments_of(text: str) -> dict[str, Any] | None:
    """A call's arguments, if what the model wrote is a JSON object; nothing stands for none."""
    try:
        orjson.loads(text or "{}")  # refuses NaN, but makes floats of long integers
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def result_text(output: str | None, error: Any) -> str:
    """What the model is told of a call, also of one that a client hands back."""
    if error is None:
        return "There is no result of this call." if output is None else output
    said: Any = error
    if isinstance(error, dict):
        said = error.get("message") or error.get("content")
        if isinstance(said, list) and all(isinstance(part, dict) and "text" in part for part in said):
            said = "\n".join(str(part["text"]) for part in said)
    return f"Error: {said if isinstance(said, str) else orjson.dumps(said).decode()}"

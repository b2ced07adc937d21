"""A server that pretends to have tools, and answers in any way that a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tests.support.server import listening

TOOL = {"name": "f", "description": "A tool.", "inputSchema": {"type": "object"}}
Answer = Callable[[Any], Awaitable[Response]]


@dataclass
class HostileTools:
    """What the server answers to a method; by default as it should, with one tool.

    Attributes:
        answers: by method, from the message to the answer.
        sent: bytes of bodies that were taken by the other side.
        paths: of all requests.
    """

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    sent: int = 0
    paths: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        self.paths.append(f"{request.method} {request.url.path}")
        if request.method != "POST":
            return (
                await self.answers[request.method]({}) if request.method in self.answers else Response(status_code=405)
            )
        message = json.loads(await request.body())
        if message.get("method") in self.answers:
            return await self.answers[message["method"]](message)
        match message.get("method"):
            case "initialize":
                version = message["params"]["protocolVersion"]
                about = {"name": "hostile", "version": "1"}
                result: Any = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
            case "tools/list":
                result = {"tools": [TOOL]}
            case "tools/call":
                result = {"content": [{"type": "text", "text": "fine"}]}
            case "server/discover":
                return reply_error(message, -32601, "no such method")
            case _:
                return Response(status_code=202)
        return reply(message, result)


def reply(message: Any, result: Any) -> Response:
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})


def reply_error(message: Any, code: int, text: str) -> Response:
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}})


@asynccontextmanager
async def hostile_tools() -> AsyncIterator[HostileTools]:
    """Serve the tools; their answers may be replaced meanwhile."""
    tools = HostileTools()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Any) -> None:
            await send(message)
            tools.sent += len(message.get("body", b""))

        response = await tools.answer(Request(scope, receive))
        await response(scope, receive, counted)

    async with listening(app) as url:
        tools.url = f"{url}/mcp"
        yield tools

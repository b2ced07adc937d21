"""Responses whose tools come from a server that answers without end, too late, or with too much."""

from __future__ import annotations

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.hostile.body import RESPONSES, Hostile, response

_BLOCK = b"x" * (1 << 16)
_HUGE = 400_000_000  # bytes
_JSON, _EVENTS = {"content-type": "application/json"}, {"content-type": "text/event-stream"}


def _start(message: Any) -> bytes:
    tool = {"name": "f", "inputSchema": {"type": "object"}, "description": ""}
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": [tool]}}).encode()[:-5]


def _huge_body(message: Any) -> Iterator[bytes]:
    yield _start(message)
    yield from itertools.repeat(_BLOCK, _HUGE // len(_BLOCK))
    yield b'"}]}}'


def _huge_line(message: Any) -> Iterator[bytes]:
    yield b"data: "
    yield from _huge_body(message)
    yield b"\n\n"


def _events(_: Any) -> Iterator[bytes]:
    return itertools.repeat(b'data: {"jsonrpc": "2.0", "method": "notifications/progress"}\n\n' * 100)


def _bomb(message: Any) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    for piece in _huge_body(message):
        yield packer.compress(piece)
    yield packer.flush()


def _lists(message: Any) -> Iterator[bytes]:
    yield _start(message) + b'", "_meta": {"x": [' + b"[]," * 1_000_000 + b"1]}}]}}"


def _page(message: Any) -> Iterator[bytes]:
    result = {"tools": [{"name": "f", "inputSchema": {"type": "object"}}] * 9, "nextCursor": "more"}
    yield json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()


# By the path of the server, which is its label as well: headers, and what it answers when its tools are listed.
_KINDS: dict[str, tuple[dict[str, str], Callable[[Any], Iterator[bytes]]]] = {
    "huge-body": (_JSON, _huge_body),
    "huge-line": (_EVENTS, _huge_line),
    "endless-events": (_EVENTS, _events),
    "compressed": ({**_JSON, "content-encoding": "gzip"}, _bomb),
    "million-lists": (_JSON, _lists),
    "endless-pages": (_JSON, _page),
}


def bodies() -> list[Hostile]:
    """All bodies of this kind. The server has to be started with the flags of `tool_servers`."""
    return [Hostile(f"tools of a server: {label}", RESPONSES, partial(_request, label)) for label in _KINDS]


def _request(label: str) -> dict[str, Any]:
    return response(tools=[{"type": "mcp", "server_label": label, "require_approval": "never"}])


@contextmanager
def tool_servers() -> Iterator[tuple[str, ...]]:
    """Serve the tools; gives the flags with which Quire knows the servers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        port = server.server_address[1]
        yield tuple(part for label in _KINDS for part in ("--tool-server", f"{label}=http://127.0.0.1:{port}/{label}"))
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """The servers of all labels."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a message."""
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match message.get("method"):
            case "tools/list":
                self._stream(*_KINDS[self.path[1:]], message)
            case "initialize":
                version = message["params"]["protocolVersion"]
                about = {"name": "hostile", "version": "1"}
                self._reply(message, result={"protocolVersion": version, "capabilities": {}, "serverInfo": about})
            case "server/discover":
                self._reply(message, error={"code": -32601, "message": "no such method"})
            case _:
                self.send_response(202)
                self.send_header("content-length", "0")
                self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the base class's name
        """Say nothing."""

    def _reply(self, message: Any, **fields: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **fields}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, headers: dict[str, str], parts: Callable[[Any], Iterator[bytes]], message: Any) -> None:
        self.close_connection = True
        self.send_response(200)
        for name, value in {**headers, "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # nobody reads on
            for part in parts(message):
                self.wfile.write(part)

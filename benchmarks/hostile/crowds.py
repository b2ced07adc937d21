"""Many clients that do the same at the same time, where one of them would do no harm."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.hostile.body import COMPLETIONS, RESPONSES, completion, response
from benchmarks.hostile.send import Answer

Address = tuple[str, int]
_HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
_LONG = 1500  # tokens of the response that is read by many
_BODY, _SENT = 31 << 20, 28 << 20  # bytes of a slow body, and those that are sent at once
_READ = 1 << 18


@dataclass(frozen=True, slots=True)
class Crowd:
    """Clients that disturb others together.

    Attributes:
        act: does it once, against a server at an address, within some seconds; returns how often each status came back.
        expected: statuses that may come back; 0 is a client that was not to be answered.
    """

    name: str
    act: Callable[[Address, float], Counter[int]]
    expected: frozenset[int]
    control: bool = False

    def send(self, address: Address, timeout: float) -> Answer:
        """Do it, and judge what came back."""
        began = time.monotonic()
        try:
            statuses = self.act(address, timeout)
        except OSError as error:
            return Answer(0, time.monotonic() - began, problem=f"connection: {error!r}")
        wrong = {status: count for status, count in statuses.items() if status not in self.expected}
        problem = f"statuses {wrong}" if wrong else None
        return Answer(max(statuses, default=0), time.monotonic() - began, statuses.total(), problem)


def crowds() -> list[Crowd]:
    """All kinds."""
    return [
        Crowd("crowd: 100 handshakes with a body", _refused_upgrades, frozenset({400})),
        Crowd("crowd: 100 handshakes with large headers", _large_upgrades, frozenset({101, 404, 503})),
        Crowd("crowd: 24 bodies of 31 MiB that stop after 28 MiB", _slow_bodies, frozenset({0, 408, 503})),
        Crowd("crowd: 200 readers of a long response", _readers, frozenset({200})),
        Crowd("crowd: 500 deadlines at once", _deadlines, frozenset({408, 503})),
        Crowd("crowd: 500 clients leave at once", _leavers, frozenset({0, 503})),
    ]


def _refused_upgrades(address: Address, timeout: float) -> Counter[int]:
    return _statuses(address, [_HANDSHAKE + b"Content-Length: 5\r\n\r\n"] * 100, timeout)


def _large_upgrades(address: Address, timeout: float) -> Counter[int]:
    return _statuses(address, [_HANDSHAKE + b"a: " + b"b" * 9000 + b"\r\n\r\n"] * 100, timeout, to_the_end=False)


def _slow_bodies(address: Address, timeout: float) -> Counter[int]:
    head = _head("POST", COMPLETIONS, _BODY)
    piece = b" " * (1 << 20)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout)) for _ in range(24)]
        refused: set[int] = set()
        for data in (head, *[piece] * (_SENT // len(piece)), *[b" " * 1024] * 5):
            for index, client in enumerate(clients):
                with suppress(OSError):  # it has been refused
                    if index not in refused:
                        client.sendall(data)
                        continue
                refused.add(index)
            if len(data) == 1024:
                time.sleep(1)  # the rest arrives at 1 KiB/s
        return Counter(_status(client, wait=0.0) for client in clients)


def _readers(address: Address, timeout: float) -> Counter[int]:
    body = response(background=True, store=True, stream=False, max_output_tokens=_LONG)
    made = _ask(address, "POST", RESPONSES, body, timeout)
    if "status" not in made:
        return Counter([made["error"]["code"]])
    end = time.monotonic() + timeout
    while made["status"] in ("queued", "in_progress") and time.monotonic() < end:
        time.sleep(0.1)
        made = _ask(address, "GET", f"{RESPONSES}/{made['id']}", None, timeout)
    replay = b"GET %b/%b?stream=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % (
        RESPONSES.encode(),
        made["id"].encode(),
    )
    return _statuses(address, [replay] * 200, timeout)


def _deadlines(address: Address, timeout: float) -> Counter[int]:
    began = time.monotonic()

    def request() -> bytes:  # all of them end at the same time
        left = max(0.1, 2.0 - (time.monotonic() - began))
        return _post(COMPLETIONS, completion(max_tokens=1800, ignore_eos=True, timeout=left))

    return _statuses(address, [request] * 500, timeout)


def _leavers(address: Address, timeout: float) -> Counter[int]:
    request = _post(COMPLETIONS, completion(max_tokens=1800, ignore_eos=True))
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout)) for _ in range(500)]
        for client in clients:
            client.sendall(request)
        time.sleep(0.5)
        return Counter(_status(client, wait=0.0) for client in clients)


def _statuses(
    address: Address, requests: Sequence[bytes | Callable[[], bytes]], timeout: float, *, to_the_end: bool = True
) -> Counter[int]:
    """Send each request on a connection of its own, and read what comes, all at the same time."""
    statuses: Counter[int] = Counter()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        clients = [stack.enter_context(socket.create_connection(address, timeout)) for _ in requests]
        for client, request in zip(clients, requests, strict=True):
            client.sendall(request if isinstance(request, bytes) else request())
            selector.register(client, selectors.EVENT_READ, None)
        end = time.monotonic() + timeout
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.5):
                answering = key.fileobj
                assert isinstance(answering, socket.socket)
                data = answering.recv(_READ)
                if key.data is None:
                    statuses[_status_of(data)] += 1
                    selector.modify(answering, selectors.EVENT_READ, "begun")
                if not data or not to_the_end:
                    selector.unregister(answering)
        statuses[0] += sum(key.data is None for key in selector.get_map().values())
    return +statuses


def _status(client: socket.socket, wait: float) -> int:
    """The status that has come back; 0 if there is none."""
    client.settimeout(wait)
    try:
        return _status_of(client.recv(_READ))
    except OSError:
        return 0


def _status_of(data: bytes) -> int:
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0


def _ask(address: Address, method: str, path: str, body: Any, timeout: float) -> Any:
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _head(method: str, path: str, length: int) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def _post(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return _head("POST", path, len(content)) + content

"""How a server shuts down: running requests finish, or get an error that says why they do not."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from quire.api.responses.store import ResponseStore
from tests.support.patience import PATIENCE
from tests.support.process import ServerProcess, eventually, no_children_of, serving, tiny_model

PROMPT = {"prompt": "abc", "max_tokens": 240, "temperature": 0, "ignore_eos": True}
LONG = {**PROMPT, "n": 40}  # for one sequence at a time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


WHERE = pytest.mark.parametrize("where", [[], ["--engine-process"]], ids=["thread", "process"])
WHERE_QUICKLY = pytest.mark.parametrize(
    "where", [pytest.param([], id="thread"), pytest.param(["--engine-process"], id="process", marks=pytest.mark.slow)]
)


@contextmanager
def streaming(server: ServerProcess, body: dict[str, object]) -> Iterator[Iterator[str]]:
    """Lines of a stream that has begun."""
    with server.http as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def in_flight(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/load", timeout=PATIENCE).json()["server_load"])


def assert_it_ended_well(server: ServerProcess) -> None:
    """Status 0, and nothing left behind that the log would tell of."""
    assert server.process.wait(60) == 0, server.log
    for word in ("Traceback", "leaked", "Cancel"):
        assert word not in server.log


@WHERE
def test_sigterm_drains_then_stops(folder: Path, where: list[str]) -> None:
    with serving(str(folder), *where) as server:
        with streaming(server, PROMPT) as lines:
            server.process.send_signal(signal.SIGTERM)
            remaining = list(lines)
        assert remaining[-1] == "[DONE]"
        assert json.loads(remaining[-2])["choices"][0]["finish_reason"] == "length"
        assert_it_ended_well(server)


@WHERE_QUICKLY
def test_a_drain_that_takes_too_long_ends_requests_with_an_error(folder: Path, where: list[str]) -> None:
    with (
        serving(str(folder), "--shutdown-timeout", "0.5", "--max-num-seqs", "1", *where) as server,
        ThreadPoolExecutor(1) as other,
    ):
        with streaming(server, LONG) as lines:
            plain = other.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
            eventually(lambda: in_flight(server) == 2)
            server.process.send_signal(signal.SIGTERM)
            remaining = list(lines)
        assert remaining[-1] == "[DONE]"
        assert "shutting down" in json.loads(remaining[-2])["error"]["message"]
        assert plain.result().status_code == 503
        assert "shutting down" in plain.result().json()["error"]["message"]
        assert_it_ended_well(server)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain_at_once(folder: Path, second: signal.Signals) -> None:
    with serving(str(folder), "--shutdown-timeout", "1000", "--max-num-seqs", "1") as server:
        with streaming(server, LONG) as lines:
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "shutting down" in server.log)
            server.process.send_signal(second)
            remaining = list(lines)
        assert remaining[-1] == "[DONE]"
        assert "shutting down" in json.loads(remaining[-2])["error"]["message"]
        assert_it_ended_well(server)


def test_a_draining_server_still_listens(folder: Path) -> None:
    """Probes see that it is not ready, and new requests go elsewhere."""
    with serving(str(folder), "--shutdown-timeout", "1000", "--max-num-seqs", "1") as server:
        with streaming(server, LONG):
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code == 503)
            assert "shutting down" in httpx.get(f"{server.url}/ready", timeout=PATIENCE).json()["error"]["message"]
            for path in ("/health", "/metrics"):
                assert httpx.get(f"{server.url}{path}", timeout=PATIENCE).status_code == 200
            for path in ("/v1/completions", "/v1/messages"):
                refused = httpx.post(f"{server.url}{path}", json=PROMPT, timeout=PATIENCE)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["connection"] == "close"
                assert "shutting down" in refused.json()["error"]["message"]
        # The client has left, so nothing is left to finish.
        assert_it_ended_well(server)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=PATIENCE)


def test_clients_that_do_not_read_do_not_hold_the_server(folder: Path) -> None:
    with serving(str(folder), "--shutdown-timeout", "0.5") as server, ExitStack() as stack:
        url, body = httpx.URL(server.url), json.dumps({**PROMPT, "n": 4, "logprobs": 5, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(100):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((url.host, url.port or 0))
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: in_flight(server) == 100)
        server.process.send_signal(signal.SIGTERM)
        assert_it_ended_well(server)


@contextmanager
def request_without_body(server: ServerProcess) -> Iterator[None]:
    """A request whose body is never sent."""
    url = httpx.URL(server.url)
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 9")
    with socket.create_connection((url.host, url.port or 0)) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode())
        eventually(lambda: in_flight(server) == 1)
        yield


def test_a_third_signal_ends_the_process_at_once(folder: Path) -> None:
    with serving(str(folder), "--shutdown-timeout", "1000", "--engine-process") as server:
        children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        with request_without_body(server):  # keeps the server for two seconds
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "shutting down" in server.log)
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: "aborting the requests" in server.log)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) == 1
        no_children_of(children)


def test_a_client_that_never_sends_its_body_does_not_hold_the_server(folder: Path) -> None:
    with serving(str(folder), "--shutdown-timeout", "0.1") as server, request_without_body(server):
        server.process.send_signal(signal.SIGTERM)
        assert_it_ended_well(server)


def store_of(folder: Path) -> str:
    return f"sqlite:///{folder.parent / 'responses.db'}"


def begin(server: ServerProcess, count: int) -> list[str]:
    """Ids of responses in the background, which are made one after the other."""
    body = {"input": "abc", "temperature": 0, "ignore_eos": True, "max_output_tokens": 200, "background": True}
    with server.http as client:
        return [str(client.post("/v1/responses", json=body).json()["id"]) for _ in range(count)]


@WHERE_QUICKLY
def test_responses_in_the_background_are_drained(folder: Path, where: list[str]) -> None:
    with serving(str(folder), "--max-num-seqs", "1", "--response-store", store_of(folder), *where) as server:
        ids = begin(server, 4)
        server.process.send_signal(signal.SIGTERM)
        assert_it_ended_well(server)
    for response_id in ids:
        stored = asyncio.run(ResponseStore(store_of(folder), 0).load(response_id, ""))
        assert stored is not None
        assert stored.response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_responses_that_would_take_too_long_are_kept_as_failed(folder: Path) -> None:
    arguments = [str(folder), "--max-num-seqs", "1", "--response-store", store_of(folder)]
    with serving(*arguments, "--shutdown-timeout", "1000") as server:
        last = begin(server, 40)[-1]
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "shutting down" in server.log)
        server.process.send_signal(signal.SIGTERM)
        assert_it_ended_well(server)
    with serving(*arguments) as server:
        response = httpx.get(f"{server.url}/v1/responses/{last}", timeout=PATIENCE).json()
    assert response["status"] == "failed"
    assert "shutting down" in response["error"]["message"]

"""The process of the only engine, which a user's server starts first of all. Servers of other tests have none."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.patience import PATIENCE
from tests.support.process import (
    assert_all_have_ended,
    eventually,
    free_port,
)

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
CHAT = {
    "messages": [{"role": "user", "content": "Who is there?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "max_tokens": 32,
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server in a new interpreter, and a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", *arguments, "--port", str(port)]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        try:
            yield process, client
        finally:
            process.kill()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def has_torch(process: psutil.Process) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def test_the_only_engine_has_a_process_and_its_server_does_without_torch() -> None:
    with started("quire-nano") as (process, client):
        eventually(lambda: is_ready(client), PATIENCE)
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["choices"][0]["message"]["content"].startswith("{")
        server = psutil.Process(process.pid)
        children = server.children(recursive=True)
        assert len([child for child in children if has_torch(child)]) == 1
        assert not has_torch(server)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "engine in a process" in log
        assert "Traceback" not in log
        assert_all_have_ended(children)


def test_a_server_whose_engine_is_killed_before_it_has_a_model_says_so() -> None:
    with started("quire-nano") as (process, _):
        server = psutil.Process(process.pid)
        eventually(lambda: bool(server.children()), PATIENCE)
        server.children()[0].kill()
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "its process ended with exit code -9" in log
        assert "Traceback" not in log

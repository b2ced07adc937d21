"""`quire bench startup`: benchmark the time from process start until ready and until the first token."""

from __future__ import annotations

import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import psutil
from tqdm import trange

from quire.app.bench.server_process import serve_command, started_server
from quire.app.files import check_writable
from quire.app.openai_client import ServerError, first_model
from quire.config.command import ConfigError
from quire.config.commands import BenchStartup

_POLL_INTERVAL = 0.02  # seconds
FIGURES = ("ready_s", "first_token_s", "cpu_s", "peak_mb")


def run(settings: BenchStartup) -> int:
    """Start the server several times and print the results; returns the exit status."""
    check_writable(settings, "result")
    _split(settings.serve_args)
    try:
        words = (*settings.model, *_split(settings.serve_args))
        rows = [timed_start(words, settings.timeout) for _ in trange(settings.runs, desc="starts")]
    except (ServerError, httpx.HTTPError) as error:
        print(f"quire bench startup: {error}", file=sys.stderr)
        return 1
    figures = {name: spread_of([row[name] for row in rows]) for name in FIGURES}
    print(f"{'':>14} {'min':>8} {'median':>8} {'max':>8}")
    for name, spread in figures.items():
        print(f"{name:>14} {spread['min']:8.2f} {spread['median']:8.2f} {spread['max']:8.2f}")
    if settings.result is not None:
        settings.result.write_text(
            json.dumps({"model": list(settings.model), "runs": rows, **figures}, indent=1) + "\n"
        )
    return 0


def timed_start(words: Sequence[str], timeout: float, **options: Any) -> dict[str, float]:
    """Return the figures of a server's start: seconds, and its memory in MiB.

    Args:
        words: arguments of `quire serve`.
        timeout: seconds until it must be ready.
        options: those of `Popen`.

    Raises:
        ServerError: it does not become ready, or refuses a request.
    """
    port = free_port()
    command = serve_command(*words, "--port", str(port))
    started = time.perf_counter()
    with started_server(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout) as client:
            wait_until_ready(client, process, started + timeout)
            ready = time.perf_counter() - started
            _first_token(client)
            first = time.perf_counter() - started
        return {"ready_s": ready, "first_token_s": first, **usage_of(process.pid)}


def _split(serve_args: str) -> list[str]:
    try:
        return shlex.split(serve_args)
    except ValueError as error:
        raise ConfigError(f"quire bench startup: --serve-args is not a valid shell command line: {error}") from error


def wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until a server is ready.

    Raises:
        ServerError: it has ended, or the deadline has passed.
    """
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with exit code {process.returncode}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_INTERVAL)
    raise ServerError("the server was not ready within --timeout")


def _first_token(client: httpx.Client) -> None:
    models = httpx.Client(base_url=client.base_url.join("/v1/"))
    with models:
        body: dict[str, Any] = {"model": first_model(models), "prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
        answer = models.post("completions", json=body, timeout=client.timeout)
    if answer.is_error:
        raise ServerError(f"the request for the first token failed: {answer.text[:200]}")


def usage_of(pid: int) -> dict[str, float]:
    """CPU seconds of a process and its children, those that have ended included, and their resident memory in MiB."""
    server = psutil.Process(pid)
    processes = [server, *server.children(recursive=True)]
    return {
        "cpu_s": sum(sum(process.cpu_times()[:4]) for process in processes),
        "peak_mb": sum(process.memory_info().rss for process in processes) / 2**20,
    }


def spread_of(values: list[float]) -> dict[str, float]:
    """Return the least, the median and the greatest of some values."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

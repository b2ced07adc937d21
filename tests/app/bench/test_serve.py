"""`quire bench serve` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.process import ServerProcess, eventually, quire, serving, tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096))) as running:
        yield running


def test_load_with_streams_that_are_closed_half_way(server: ServerProcess, tmp_path: Path) -> None:
    """64 streams at once, a third of them aborted: no error, and nothing is held afterwards."""
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    said = quire(
        *("bench", "serve", "--url", f"{server.url}/v1", "--num-requests", "128", "--concurrency", "64"),
        *("--input-len", "10", "--prefix-len", "20", "--output-len", "40", "--abort-fraction", "0.33"),
        *("--result", str(result), "--plot", str(plot)),
    )
    figures = json.loads(result.read_text())
    assert figures["failed"] == 0
    assert figures["completed"] + figures["aborted"] == 128
    assert 0 < figures["aborted"] < 65  # fewer where a busy machine merges chunks
    assert figures["cached_tokens"] > 0
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p99"]
    assert "output tokens/s" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    eventually(lambda: server.metric("kv_cache_blocks_used") == 0)
    assert server.metric("num_requests_running") == 0
    assert server.metric("request_success_total") == 128


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_stays_flat_under_five_minutes_of_such_load(tmp_path: Path) -> None:
    # Of sizes that the compiled kernels take, as real models are: torch's own products would keep a compiled form for
    # each of the first 1,024 shapes that they meet.
    folder = tiny_model(tmp_path / "tiny", max_position_embeddings=4096, head_dim=32)
    # Pages take memory once they are written: of a small cache all are within the first minute, on any machine.
    with serving(str(folder), "--dtype", "bfloat16", "--kv-cache-memory-bytes", "32MiB") as server:
        _stays_flat(server, tmp_path)


def _stays_flat(server: ServerProcess, tmp_path: Path) -> None:
    load = [
        *("bench", "serve", "--url", f"{server.url}/v1", "--concurrency", "64", "--input-len", "10"),
        *("--output-len", "40", "--abort-fraction", "0.33", "--result", str(tmp_path / "r.json")),
    ]
    process = psutil.Process(server.process.pid)

    def resident_after(seconds: int, seed: int) -> float:
        out = subprocess.run(
            [sys.executable, "-m", "quire", *load, "--duration", str(seconds), "--workload-seed", str(seed)], check=True
        )
        assert out.returncode == 0
        assert json.loads((tmp_path / "r.json").read_text())["failed"] == 0
        eventually(lambda: server.metric("kv_cache_blocks_used") == 0)
        return process.memory_info().rss / 2**20

    resident = [resident_after(60, seed) for seed in range(6)]
    print("resident MiB after each minute:", [round(value) for value in resident])
    assert max(resident[1:]) - resident[0] < 0.05 * resident[0]


def test_load_at_a_rate_over_chat(server: ServerProcess, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    quire(
        *("bench", "serve", "--url", f"{server.url}/v1", "--duration", "2", "--request-rate", "5"),
        *("--endpoint", "chat", "--input-len", "5", "--output-len", "4", "--result", str(result)),
    )
    figures = json.loads(result.read_text())
    assert figures["failed"] == 0
    assert 1 <= figures["completed"] <= 40


def test_a_server_that_is_not_there_is_an_error() -> None:
    for command in (("bench", "serve"), ("chat", "--message", "x")):
        assert "could not list the models of" in quire(*command, "--url", "http://127.0.0.1:9/v1", status=1)

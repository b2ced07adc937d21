"""`quire bench pooling` against a server over the fake core."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from quire.app.bench.pooling import run
from quire.config.command import ConfigError
from quire.config.commands import BenchPooling
from tests.support.pooling_server import pooling_server


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank"])
async def test_load(tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    flags = [
        *("--endpoint", endpoint, "--num-requests", "12", "--concurrency", "4", "--batch-size", "5"),
        *("--min-len", "2", "--max-len", "20", "--result", str(result)),
    ]
    async with pooling_server(tmp_path / "model") as server:
        settings = BenchPooling.parse([*flags, "--url", f"{server.url}/v1"])
        assert await asyncio.to_thread(run, settings) == 0
        page = (await server.http.get("/metrics")).text
    assert f'http_requests_total{{handler="/v1/{endpoint}",method="POST",status="2xx"}} 12.0' in page
    figures = json.loads(result.read_text())
    assert (figures["completed"], figures["failed"], figures["model"]) == (12, 0, "fake")
    assert figures["texts_per_second"] == pytest.approx(5 * figures["requests_per_second"])
    assert figures["prompt_tokens"] > 0
    assert 0 < figures["e2e_ms"]["p50"] <= figures["e2e_ms"]["p99"]
    assert "texts/s" in capsys.readouterr().out


async def test_errors_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with pooling_server(tmp_path / "model") as server:
        flags = ["--num-requests", "3", "--batch-size", "1", "--min-len", "400", "--url", f"{server.url}/v1"]
        assert await asyncio.to_thread(run, BenchPooling.parse(flags)) == 1
        assert await asyncio.to_thread(run, BenchPooling.parse([*flags, "--truncate"])) == 0
        missing = BenchPooling.parse(["--url", "http://127.0.0.1:9/v1"])
        assert await asyncio.to_thread(run, missing) == 1
    shown = capsys.readouterr()
    assert "3 failed" in shown.out
    assert "maximum context length" in shown.out
    assert "could not list the models" in shown.err


def test_lengths_must_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"--min-len is \d+, but must be at most --max-len"):
        run(BenchPooling.parse(["--min-len", "9", "--max-len", "8"]))

"""`quire serve`: pauses, new weights and profiles, with a model."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.patience import PATIENCE
from tests.support.process import ServerProcess, quire, serving, tiny_model

BODY = {"prompt": "abcdefgh" * 6, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def text(client: httpx.Client) -> str:
    return str(client.post("/v1/completions", json=BODY).raise_for_status().json()["choices"][0]["text"])


def paused_in_the_middle(server: ServerProcess, client: httpx.Client) -> str:
    """The text of a stream during which the server pauses, and another client resumes it."""
    pieces: list[str] = []
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == 2:
                with server.http as other:
                    assert other.post("/pause?mode=keep").json() == {"status": "paused"}
                    assert other.get("/health").status_code == 200
                    assert other.get("/is_paused").json() == {"is_paused": True}
                threading.Thread(
                    target=httpx.post, args=(f"{server.url}/resume",), kwargs={"timeout": PATIENCE}
                ).start()
    return "".join(pieces)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--engine-process"], marks=pytest.mark.slow),
        pytest.param(["--tensor-parallel-size", "2"], marks=pytest.mark.slow),
    ],
    ids=["thread", "process", "ranks"],
)
def test_a_server_pauses_gets_new_weights_and_is_profiled(tmp_path: Path, flags: list[str]) -> None:
    old, _ = (tiny_model(tmp_path / "models" / str(seed), num_hidden_layers=1, seed=seed) for seed in (0, 1))
    traces = tmp_path / "traces"
    config = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    options = ["--weight-update-path", str(old.parent), "--profiler-config", json.dumps(config), "--dtype", "float32"]
    with serving(str(old), *options, *flags) as server, server.http as client:
        before = text(client)
        assert paused_in_the_middle(server, client) == before
        refused = client.post("/update_weights", json={"path": "none"})
        assert refused.status_code == 400
        assert "is not a directory" in refused.json()["error"]["message"]
        assert text(client) == before
        assert client.post("/update_weights", json={"path": "1"}).status_code == 200
        assert text(client) != before
        assert client.post("/update_weights", json={"path": "0"}).status_code == 200
        assert text(client) == before
        assert client.post("/start_profile").status_code == 200
        text(client)
        assert client.post("/stop_profile").status_code == 200
        files = list(traces.iterdir())
        assert len(files) == (2 if "--tensor-parallel-size" in flags else 1)
        for file in files:
            assert b"step of" in gzip.decompress(file.read_bytes())
        if flags:
            said = quire(
                *("bench", "serve", "--url", f"{server.url}/v1", "--profile", "--num-requests", "2"),
                *("--input-len", "4", "--output-len", "4"),
            )
            assert "output tokens/s" in said
            assert len(list(traces.iterdir())) == 2 * len(files)
    assert "Traceback" not in server.log

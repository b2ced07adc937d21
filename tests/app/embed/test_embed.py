"""`quire embed` against a server over the fake core, and with a model in the process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from quire.app.embed.command import run
from quire.config.command import ConfigError
from quire.config.commands import Embed
from tests.support.fake_core import FakeCore
from tests.support.pooling import SIZE
from tests.support.pooling_server import pooling_server, vectors
from tests.support.process import tiny_model

TEXTS = [f"text number {i}" for i in range(23)]


def corpus(folder: Path, name: str = "corpus.jsonl") -> Path:
    """The texts with blank lines between some of them."""
    path = folder / name
    lines = TEXTS if name.endswith(".txt") else [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    path.write_text("\n\n".join(lines[:5]) + "\n" + "\n".join(lines[5:]) + "\n")
    return path


def left_over(folder: Path) -> list[str]:
    """Names of files that are not complete."""
    return [file.name for file in folder.glob(".*")]


async def embed(*arguments: str) -> int:
    return await asyncio.to_thread(run, Embed.parse(arguments))


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.txt"])
async def test_a_servers_embeddings_are_written_in_order(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus(tmp_path, name)
    async with pooling_server(tmp_path / "model") as server:
        flags = ("--url", f"{server.url}/v1", "--text-field", "body", "--batch-size", "4", "--concurrency", "3")
        assert await embed(str(path), *flags) == 0
        expected = vectors((await server.post("/v1/embeddings", {"input": TEXTS})).json())
    actual = np.load(tmp_path / "corpus.npy")
    assert actual.dtype == np.float32
    assert np.array_equal(actual, expected)
    shown = capsys.readouterr()
    assert "23 embeddings written" in shown.out
    assert "23/23" in shown.err


async def test_options_reach_the_server(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "long " * 300}) + "\n")
    files = {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}
    async with pooling_server(tmp_path / "model", files=files) as server:
        flags = ("--url", f"{server.url}/v1", "--dimensions", "4", "--prompt-name", "query", "--model-name", "alias")
        assert await embed(str(path), "--out", str(tmp_path / "a.npy"), *flags) == 0
        assert await embed(str(path), "--out", str(tmp_path / "b.npy"), "--no-truncate", *flags) == 1
    assert np.load(tmp_path / "a.npy").shape == (1, 4)
    assert not (tmp_path / "b.npy").exists()
    assert left_over(tmp_path) == []


async def test_a_text_that_is_refused_is_named_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus(tmp_path)
    core = FakeCore(refuses=lambda message: len(message.prompt) == len("text number 10"))
    async with pooling_server(tmp_path / "model", core=core) as server:
        assert await embed(str(path), "--url", f"{server.url}/v1", "--text-field", "body", "--batch-size", "6") == 1
    assert "corpus.jsonl, line 15: 400: this one is refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": 5}', "expected an object with a string in 'text'"),
        ('{"other": "x"}', "expected an object with a string in 'text'"),
        ('["x"]', "expected an object with a string in 'text'"),
        ('{"text": ', "the line is not JSON"),
    ],
)
async def test_a_line_without_a_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    async with pooling_server(tmp_path / "model") as server:
        assert await embed(str(path), "--url", f"{server.url}/v1") == 1
    assert f"line 2: {complaint}" in capsys.readouterr().err


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    core = FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path / "model", core=core, capacity=1) as server:
        blocking = asyncio.create_task(server.post("/v1/embeddings", {"input": "x"}))
        while not core.active:
            await asyncio.sleep(0)
        running = asyncio.create_task(embed(str(path), "--url", f"{server.url}/v1", "--text-field", "body"))
        while 'status="5xx"' not in (await server.http.get("/metrics")).text:
            await asyncio.sleep(0)
        core.hold.clear()
        assert (await blocking).status_code == 200
        assert await running == 0


async def test_an_empty_file_gives_an_empty_array(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n")
    async with pooling_server(tmp_path / "model") as server:
        assert await embed(str(tmp_path / "corpus.txt"), "--url", f"{server.url}/v1") == 0
    assert np.load(tmp_path / "corpus.npy").shape == (0, 0)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
async def test_parquet_has_texts_and_embeddings(tmp_path: Path) -> None:
    from pyarrow import parquet

    path, out = corpus(tmp_path), tmp_path / "out.parquet"
    async with pooling_server(tmp_path / "model") as server:
        flags = ("--out", str(out), "--url", f"{server.url}/v1", "--text-field", "body", "--batch-size", "10")
        assert await embed(str(path), *flags) == 0
    table = parquet.read_table(out)
    assert table["body"].to_pylist() == TEXTS
    assert np.array(table["embedding"].to_pylist()).shape == (23, SIZE)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--url", "http://localhost:1", "--serve-args", "--dtype float32"), "--serve-args has no effect with --url"),
        (("--model-name", "x", "--out", "o.csv"), "--out expects a .npy or .parquet file"),
        (("--model-name", "x", "--out", "nowhere/o.npy"), "--out expects a writable file"),
        (("--model-name", "x", "--serve-args", "--dtype 'float"), "--serve-args expects flags"),
        (("--model-name", "x", "--serve-args", "--dtype int3"), "--dtype expects"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(Embed.parse((str(corpus(tmp_path)), *flags)))


def test_parquet_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.app.embed.command.has_parquet", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[parquet\]'"):
        run(Embed.parse((str(corpus(tmp_path)), "--model-name", "x", "--out", str(tmp_path / "o.parquet"))))


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Embed.parse((str(corpus(tmp_path)), "--url", "http://127.0.0.1:9/v1"))) == 1
    assert "could not list the models" in capsys.readouterr().err


def test_a_model_in_the_process_gives_the_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model(tmp_path / "tiny")
    path = corpus(tmp_path)
    flags = ("--text-field", "body", "--batch-size", "5", "--model-name", str(folder))
    assert run(Embed.parse((str(path), *flags))) == 1  # it generates
    assert "does not embed; its tasks are generate" in capsys.readouterr().err
    serve = ("--serve-args", "--convert embed --dtype float32")
    assert run(Embed.parse((str(path), *flags, *serve))) == 0, capsys.readouterr().err
    actual = np.load(tmp_path / "corpus.npy")
    assert actual.shape == (23, 64)
    assert np.allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-5)
    assert np.abs(actual[0] - actual[1]).max() > 1e-3

"""all-MiniLM-L6-v2 served beside quire-nano, which generates meanwhile: its embeddings are those of the reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from tests.support.minilm import model_folder, reference, texts, tokenized
from tests.support.process import ServerProcess, eventually, serving

NAME = "minilm"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folder = model_folder()
    names = ("--served-model-name", f"{NAME}={folder}", "--served-model-name", "nano=quire-nano")
    with serving(
        "quire-nano", str(folder), *names, "--dtype", "float32", "--kv-cache-memory-bytes", "256MiB"
    ) as running:
        yield running


@contextmanager
def generation(server: ServerProcess, streams: int) -> Iterator[None]:
    """Some clients that ask for texts, one after another."""
    stop = threading.Event()

    def ask() -> None:
        body = {"model": "nano", "prompt": "Tell me about rivers.", "max_tokens": 200, "ignore_eos": True}
        with server.http as client:
            while not stop.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: server.metric("generation_tokens_total") > 0)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_embeddings_beside_generation_are_those_of_the_reference(server: ServerProcess, count: int) -> None:
    """In one batch, in small ones, and alone."""
    folder, inputs = model_folder(), texts(count)
    expected = reference(folder, tokenized(folder, count))
    with generation(server, 2), server.http as client:
        before = server.metric("generation_tokens_total")
        for size in (count, 7, 1):
            chosen = range(0, count, 10) if size == 1 else range(count)
            for begin in range(0, len(chosen), size):
                rows = chosen[begin : begin + size]
                actual = embed(client, [inputs[row] for row in rows])
                assert (1 - (actual * expected[rows]).sum(1)).max() < 1e-5
        eventually(lambda: server.metric("generation_tokens_total") > before)


def embed(client: httpx.Client, inputs: list[str]) -> np.ndarray:
    answer = client.post("/v1/embeddings", json={"model": NAME, "input": inputs, "truncate_prompt_tokens": -1})
    answer.raise_for_status()
    return np.array([entry["embedding"] for entry in answer.json()["data"]], np.float64)

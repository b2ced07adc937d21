"""`quire serve --kv-offloading-disk-size`: prompts that a server has computed are read from the disk after its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.kv_events import Subscriber
from tests.support.llmd import Indexer
from tests.support.process import ServerProcess, eventually, failing, free_port, serving, tiny_model

SYSTEM = "You answer in one word. " * 125  # 3,000 tokens of one byte each


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder, max_position_embeddings=4096, num_hidden_layers=2)


@contextmanager
def server_of(model: Path, tier: Path, *more: str) -> Iterator[ServerProcess]:
    options = ("--kv-offloading-path", str(tier), "--kv-cache-memory-bytes", "64MiB", "--dtype", "float32")
    # Of a small tier, as one leaves free as much as it may take, and the disk may be nearly full.
    size = () if "--kv-offloading-disk-size" in more else ("--kv-offloading-disk-size", "0.03125")
    with serving(str(model), *options, *size, *more) as server:
        yield server


def post(server: ServerProcess, path: str, **content: Any) -> httpx.Response:
    with server.http as client:
        return client.post(path, **content)


def ask(server: ServerProcess, question: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": SYSTEM + question, "max_tokens": 8, "temperature": 0, **fields}
    answer = post(server, "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def wait_until_saved(server: ServerProcess) -> None:
    """The server writes blocks while it is idle."""
    eventually(
        lambda: server.metric("kv_offload_unwritten_blocks") == 0 < server.metric("kv_offload_store_bytes_total")
    )


def test_a_restarted_server_reads_its_system_prompt(model: Path, tmp_path: Path) -> None:
    """Also if the one before was killed, and some files are torn."""
    with server_of(model, tmp_path) as server:
        first = ask(server, "Why?")
        assert cached(first) == 0
        wait_until_saved(server)
    # It was killed.
    with server_of(model, tmp_path) as server:
        again = ask(server, "Why?")
        assert again["choices"] == first["choices"]
        assert cached(again) >= 0.9 * again["usage"]["prompt_tokens"]
        read = cached(again)
        assert server.metric("external_prefix_cache_hits_total") == read
        assert server.metric("prefix_cache_hits_total") == 0
        assert server.metric("kv_offload_load_bytes_total") > 0
        in_memory = ask(server, "Who?")
        assert cached(in_memory) >= 2976
        assert server.metric("external_prefix_cache_hits_total") == read
    blocks = sorted(tmp_path.glob("*/*/*.kv"))
    assert len(blocks) > 185
    for path in blocks[::2]:
        path.write_bytes(path.read_bytes()[:-1])
    with server_of(model, tmp_path) as server:
        torn = ask(server, "Why?")
        assert torn["choices"] == first["choices"]
        assert cached(torn) < 2900
        assert "damaged blocks of the prefix cache are removed" in server.log
        wait_until_saved(server)
        assert post(server, "/reset_prefix_cache?reset_external=true").status_code == 200
        eventually(lambda: not list(tmp_path.glob("*/*/*.kv")))
        assert cached(ask(server, "Why?")) == 0


@pytest.mark.slow  # starts two servers
def test_the_bound_is_kept_and_a_salt_divides_users(model: Path, tmp_path: Path) -> None:
    with server_of(model, tmp_path, "--kv-offloading-disk-size", "0.001") as server:
        for question in "abc":
            ask(server, question, cache_salt=question)
        wait_until_saved(server)
        assert 0 < server.metric("kv_offload_used_bytes") <= 0.001 * 2**30
    with server_of(model, tmp_path) as server:
        assert cached(ask(server, "c", cache_salt="d")) == 0


def test_followers_learn_what_is_on_the_disk(model: Path, tmp_path: Path) -> None:
    """Also of blocks that an earlier process has written, once they were read."""
    port, replay, tier = free_port(), free_port(), tmp_path / "kv"
    events_at, replay_at = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": events_at,
        "replay_endpoint": replay_at,
        "topic": "kv@10.0.0.5:8000@tiny",
    }
    events = ("--kv-events-config", json.dumps(config).replace("127.0.0.1", "*"))

    def index() -> Indexer:
        indexer = Indexer(16)
        with Subscriber(events_at, replay_at) as subscriber:
            for topic, payload in subscriber.replayed():
                indexer.take(topic, payload)
        return indexer

    for _ in range(2):
        with server_of(model, tier, *events) as server:
            ask(server, "Why?")
            eventually(lambda: (told := index()).second_tier == told.present and len(told.present) >= 187)
    with server_of(model, tier, *events) as server:
        ask(server, "Why?")
        assert post(server, "/reset_prefix_cache?reset_external=true").status_code == 200
        eventually(lambda: not index().present)
        assert not index().second_tier
        ask(server, "Why?")
        eventually(lambda: len(index().second_tier) >= 187)


def test_settings_that_cannot_work_are_refused(model: Path, tmp_path: Path) -> None:
    path = ("--kv-offloading-path", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    assert "--kv-offloading-path" in failing(str(model), "--kv-offloading-disk-size", "1", *path)
    output = failing(str(model), "--kv-offloading-disk-size", "1", "--no-enable-prefix-caching")
    assert "--kv-offloading-disk-size needs --enable-prefix-caching" in output
    assert "native" in failing(str(model), "--kv-offloading-backend", "lmcache")

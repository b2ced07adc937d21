"""A server that publishes KV events, as llm-d's endpoint picker and its index of prefixes read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

from tests.support import dynamo
from tests.support.deployment import ROOT
from tests.support.kv_events import Subscriber, decode_batch
from tests.support.llmd import Indexer, metric, request_keys
from tests.support.picture_chat import base64_of
from tests.support.pictures import encoded
from tests.support.process import ServerProcess, failing, free_port, serving

MODEL = "quire-nano-see"
PROMPT = "A picture of a red circle, a blue square, a green triangle and a yellow star on a white ground. " * 6
PICKER = yaml.safe_load((ROOT / "deploy" / "llm-d" / "picker.yaml").read_text())


class Published:
    """A server, and an index that follows it."""

    def __init__(self, server: ServerProcess, client: httpx.Client, subscriber: Subscriber, encoding: str) -> None:
        self.server = server
        self.client = client
        self.subscriber = subscriber
        self.encoding = encoding

    def index(self, size: int = 16) -> Indexer:
        """What a picker that begins now learns of the server."""
        indexer = Indexer(size)
        for topic, payload in self.subscriber.replayed():
            indexer.take(topic, payload)
        return indexer

    def tree(self) -> dynamo.PrefixTree:
        """What a router of Dynamo's that begins now learns of the server."""
        tree = dynamo.PrefixTree(16)
        for _, payload in self.subscriber.replayed():
            tree.take(payload)
        return tree


@pytest.fixture(scope="module", name="published", params=["map", "array"])
def _published(request: pytest.FixtureRequest) -> Iterator[Published]:
    port, replay = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": f"kv@10.0.0.5:8000@{MODEL}",
        "encoding": request.param,
    }
    with (
        serving(MODEL, "--kv-events-config", json.dumps(config)) as server,
        server.http as client,
        Subscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}", b"kv@") as subscriber,
    ):
        yield Published(server, client, subscriber, request.param)


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(content)}], "max_tokens": 2, **fields}


def picture(color: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64_of(encoded(Image.new('RGB', (64, 64), color)))}"
    return {"type": "image_url", "image_url": {"url": url}}


def rendering(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(f"{path}/render", json=body).raise_for_status().json()
    rendered: dict[str, Any] = answer[0] if isinstance(answer, list) else answer
    return rendered


def keys_of(client: httpx.Client, path: str, body: dict[str, Any], size: int = 16) -> list[int]:
    return request_keys(rendering(client, path, body), MODEL, size, body.get("cache_salt"))


def path_of(client: httpx.Client, body: dict[str, Any]) -> dynamo.Path:
    rendered = rendering(client, "/v1/chat/completions", body)
    features = rendered.get("features") or {"mm_hashes": {}, "mm_placeholders": {}}
    media = [
        (place["offset"], place["offset"] + place["length"], digest)
        for kind, hashes in features["mm_hashes"].items()
        for digest, place in zip(hashes, features["mm_placeholders"][kind], strict=True)
    ]
    return dynamo.request_path(rendered["token_ids"], media, 16, body.get("cache_salt"))


@pytest.mark.parametrize("size", [16, 8, 32])
def test_the_picker_finds_the_prefix_of_a_completion(published: Published, size: int) -> None:
    """Also with blocks of another size than the server's."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    published.client.post("/v1/completions", json=body).raise_for_status()
    keys = keys_of(published.client, "/v1/completions", body, size)
    assert len(keys) > 3
    index = published.index(size)
    assert len(keys) - 2 * max(1, 16 // size) < index.matched(keys) <= len(keys)
    other = keys_of(published.client, "/v1/completions", {**body, "prompt": "Another. " + PROMPT}, size)
    assert index.matched(other) == 0


def test_pictures_and_salts_are_parts_of_the_prefix(published: Published) -> None:
    text, client = {"type": "text", "text": PROMPT}, published.client
    asked = [chat(picture("red"), text), chat(picture("red"), text, cache_salt="a"), chat(text, cache_salt="a")]
    others = [chat(picture("blue"), text), chat(picture("red"), text, cache_salt="b"), chat(text, cache_salt="b")]
    for body in asked:
        client.post("/v1/chat/completions", json=body).raise_for_status()
    index = published.index()
    for body, other in zip(asked, others, strict=True):
        keys = keys_of(client, "/v1/chat/completions", body)
        assert index.matched(keys) == len(keys) > 3
        assert index.matched(keys_of(client, "/v1/chat/completions", other)) < 3


def test_dynamos_router_finds_the_same_prefixes(published: Published) -> None:
    text, client = {"type": "text", "text": "Dynamo asks. " + PROMPT}, published.client
    salted = {"cache_salt": f"{dynamo.SALT_PREFIX}a"}
    asked = [chat(text), chat(picture("green"), text), chat(picture("green"), text, **salted)]
    others = [chat(text, **salted), chat(picture("yellow"), text), chat(picture("yellow"), text, **salted)]
    for body in asked:
        client.post("/v1/chat/completions", json=body).raise_for_status()
    tree = published.tree()
    for body, other in zip(asked, others, strict=True):
        path = path_of(client, body)
        assert tree.matched(path) == len(path) > 3
        assert tree.matched(path_of(client, other)) < 3
    client.post("/reset_prefix_cache").raise_for_status()
    assert published.tree().paths == {}


def test_a_reset_empties_the_index(published: Published) -> None:
    body = {"model": MODEL, "prompt": "Reset. " + PROMPT, "max_tokens": 2}
    published.client.post("/v1/completions", json=body).raise_for_status()
    keys = keys_of(published.client, "/v1/completions", body)
    assert published.index().matched(keys) > 3
    published.client.post("/reset_prefix_cache").raise_for_status()
    assert published.index().matched(keys) == 0


def test_the_picker_finds_all_metrics_that_it_asks_for(published: Published) -> None:
    (extractor,) = (plugin for plugin in PICKER["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    builtin = {name: spec.replace("quire:", "vllm:") for name, spec in engine.items() if name.endswith("Spec")}
    page = published.client.get("/metrics").text
    for specs in (engine, builtin):
        assert metric(page, specs["queuedRequestsSpec"])[0] == 0
        assert metric(page, specs["runningRequestsSpec"])[0] == 0
        assert 0 <= metric(page, specs["kvUsageSpec"])[0] <= 1
        value, labels = metric(page, specs["cacheInfoSpec"])
        assert value == 1
        assert (int(labels["block_size"]), int(labels["num_gpu_blocks"]) > 0) == (16, True)


def test_the_server_says_where_it_publishes(published: Published) -> None:
    (source,) = published.client.get("/kv_event_sources").json().values()
    assert source["topic"] == f"kv@10.0.0.5:8000@{MODEL}"
    assert (source["publisher"], source["encoding"]) == ("zmq", published.encoding)
    assert source["endpoint"].startswith("tcp://*:")


@pytest.mark.slow
def test_each_replica_publishes_at_its_own_port(tmp_path: Path) -> None:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    flags = ("--kv-events-config", json.dumps(config), "--data-parallel-size", "2")
    with serving("quire-nano", *flags) as server, server.http as client:
        body = {"model": "quire-nano", "prompt": PROMPT, "max_tokens": 2}
        for rank in (0, 1):
            client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": str(rank)}).raise_for_status()
        sources = client.get("/kv_event_sources").json()
        assert [source["endpoint"] for source in sources.values()] == [f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/e_dp1"]
        for rank, source in sources.items():
            with Subscriber(source["endpoint"], source["replay_endpoint"]) as subscriber:
                batches = [decode_batch(payload) for _, payload in subscriber.missed(0)]
            assert {batch[2] for batch in batches} == {int(rank)}
            assert any(event["type"] == "BlockStored" for batch in batches for event in batch[1])


def test_several_models_are_refused() -> None:
    assert "--kv-events-config works with one MODEL, but 4 are served" in failing(
        "--kv-events-config", '{"enable_kv_cache_events": true}'
    )


@pytest.mark.parametrize("value", ['{"enabled": true}', '{"endpoint": "tcp://*"}', '{"publisher": "kafka"}', "[]"])
def test_wrong_settings_are_refused(value: str) -> None:
    assert "--kv-events-config expects a JSON object with enable_kv_cache_events, publisher" in failing(
        MODEL, "--kv-events-config", value
    )

"""Quire on a Ray cluster of this machine, as `serve run` starts it from deploy/ray/serve.yaml."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks.ray_cluster import Cluster, cluster, quire_config
from tests.support.process import assert_all_have_ended, eventually
from tests.support.realtime import RATE, Client, silence

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
RECORDING = Path(__file__).parents[1] / "app" / "recordings" / "english.flac"
SPOKEN = "We are going to the mountain in the morning."
CHAT: dict[str, Any] = {"model": "quire-nano", "temperature": 0, "messages": [{"role": "user", "content": "27 + 58?"}]}


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def two(running: Cluster) -> Iterator[Cluster]:
    """Two replicas, with the config as it is."""
    with running.serving(quire_config()):
        running.wait_for_replicas(2)
        yield running


async def test_openais_client_gets_chats_and_streams(two: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**CHAT, max_tokens=200)
        stream = await client.chat.completions.create(**CHAT, max_tokens=200, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert "85" in text
    assert whole.choices[0].message.content == text


async def test_ids_and_errors_are_those_of_quire(two: Cluster) -> None:
    async with httpx.AsyncClient(base_url=two.url) as client:
        missing = await client.post("/v1/chat/completions", json={**CHAT, "model": "x"}, headers={"x-request-id": "a1"})
        wrong = await client.post("/v1/chat/completions", json={**CHAT, "n": "many"})
        administrator = await client.post("/sleep")

    assert missing.status_code == 404
    assert missing.headers.get_list("x-request-id") == ["a1"]
    assert wrong.status_code == 400
    assert administrator.status_code == 403


async def test_a_realtime_session_hears_what_is_spoken(two: Cluster) -> None:
    samples = soundfile.read(RECORDING, dtype="int16")[0]
    async with connect(f"{two.url.replace('http', 'ws')}/v1/realtime?model=quire-nano-hear") as connection:
        client = Client(connection)
        await client.expect("session.created")
        await client.update(format={"type": "audio/pcm", "rate": RATE})
        await client.append(np.concatenate([silence(1.0), samples, silence(1.0)]))
        events = await client.until("conversation.item.input_audio_transcription.completed")

    assert events[-1]["transcript"] == SPOKEN


async def _stream(client: httpx.AsyncClient, number: int, started: asyncio.Semaphore) -> list[Any]:
    """The events of a long stream; `started` is released at the first."""
    messages = [{"role": "user", "content": f"Number {number}. " * 60}]
    body = {**CHAT, "messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True}
    events: list[Any] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                if not events:
                    started.release()
                events.append(None if line == "data: [DONE]" else json.loads(line[6:]))
    return events


async def test_of_a_killed_replica_only_its_streams_end_with_an_error(two: Cluster) -> None:
    started = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=two.url, timeout=300) as client:
        streams = [asyncio.create_task(_stream(client, number, started)) for number in range(6)]
        for _ in streams:
            await started.acquire()
        victim, other = two.replicas()
        victim.kill()
        outcomes = await asyncio.gather(*streams)
        failed = [events for events in outcomes if any(event and "error" in event for event in events)]
        complete = [events for events in outcomes if events not in failed]

        assert len(failed) in range(1, 6)
        assert all(events[-2]["error"]["type"] == "ServiceUnavailableError" for events in failed)
        assert all(events[-2]["choices"][0]["finish_reason"] == "length" for events in complete)
        assert all(events[-1] is None for events in outcomes)
        assert other.is_running()
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
    await asyncio.to_thread(two.wait_for_replicas, 2)


async def test_a_session_of_a_killed_replica_ends_with_an_error_event(two: Cluster) -> None:
    async with connect(f"{two.url.replace('http', 'ws')}/v1/realtime?model=quire-nano-hear") as connection:
        client = Client(connection)
        await client.expect("session.created")
        for replica in two.replicas():
            replica.kill()
        event = await client.receive()
        with pytest.raises(ConnectionClosed) as closed:
            await client.receive()

    assert event["type"] == "error"
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


async def test_replicas_come_and_go_with_the_load_without_an_error(running: Cluster, two: Cluster) -> None:
    """Runs late: it replaces the application of the other tests."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "look_back_period_s": 3,
        "policy": {"policy_function": "quire.ray.autoscaling:by_sequences"},
    }
    statuses: set[int] = set()
    under_load = asyncio.Event()
    body = {**CHAT, "max_tokens": 100, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient, *, always: bool) -> None:
        while always or under_load.is_set():
            statuses.add((await client.post("/v1/chat/completions", json=body)).status_code)

    with running.serving(quire_config(autoscaling_config=scaling)):
        await asyncio.to_thread(running.wait_for_replicas, 1)
        under_load.set()
        async with httpx.AsyncClient(base_url=running.url, timeout=300) as client, asyncio.TaskGroup() as tasks:
            steady = tasks.create_task(ask(client, always=True))
            load = [tasks.create_task(ask(client, always=False)) for _ in range(8)]
            await asyncio.to_thread(running.wait_for_replicas, 2)
            under_load.clear()
            await asyncio.wait(load)
            await asyncio.to_thread(running.wait_for_replicas, 1)
            steady.cancel()
    assert statuses == {200}


def test_a_replica_has_two_ranks(running: Cluster) -> None:
    config = quire_config(args={"model": "quire-nano", "tensor_parallel_size": 2}, num_replicas=1)
    with running.serving(config):
        running.wait_for_replicas(1)
        (replica,) = running.replicas()
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={**CHAT, "max_tokens": 200}, timeout=300)
        assert "85" in answer.json()["choices"][0]["message"]["content"]
        processes = [replica, *replica.children(recursive=True)]
        assert any("spawn_main" in str(process.cmdline()) for process in processes), "there is no second rank"
    assert_all_have_ended(processes)


def test_nothing_of_a_replica_is_left_when_its_application_has_ended(running: Cluster) -> None:
    eventually(lambda: not running.replicas())

"""Transport: messages survive a round trip, and invalid frames raise MalformedMessage."""

from __future__ import annotations

import asyncio
import select
import tempfile
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.errors import FrontEndClosed, MalformedMessage
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    AddRequests,
    ClientMessage,
    CoreMessage,
    Ping,
    Pong,
    PooledOutput,
    Resume,
    RunCommand,
    Shutdown,
    StepOutput,
    StepStats,
    TokenLogprobs,
    TokensOutput,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.transport import ClientChannel, CoreChannel, MessageDecoder, MessageEncoder
from tests.support.process import free_port


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    salt=st.none() | st.text(),
)
@settings(deadline=None)
def test_requests_round_trip(tokens: list[int], seed: int | None, bias: dict[int, float], salt: str | None) -> None:
    params = SamplingParams(
        max_tokens=5, seed=seed, logit_bias=bias, stop_token_ids=frozenset({1, 2}), bad_words=((3,), (4, 5))
    )
    sent = AddRequest("id", np.array(tokens, np.int32), params, priority=-3, cache_salt=salt)
    decoded = MessageDecoder[ClientMessage](ClientMessage).decode(MessageEncoder().encode(sent))
    assert isinstance(decoded, AddRequest)
    assert decoded.prompt.tolist() == tokens
    assert decoded.prompt.dtype == np.int32
    assert (decoded.params, decoded.priority, decoded.cache_salt) == (params, -3, salt)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (32, 32), (1025,), (4, 1000)])
def test_arrays_of_any_size_round_trip(shape: tuple[int, ...]) -> None:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    frames = MessageEncoder().encode(StepOutput([PooledOutput("id", data)], StepStats()))
    assert len(frames) == (1 if data.nbytes <= 4096 else 2)
    decoded = MessageDecoder[CoreMessage](CoreMessage).decode(frames)
    assert isinstance(decoded, StepOutput)
    (output,) = decoded.outputs
    assert isinstance(output, PooledOutput)
    assert np.array_equal(output.data, data)


async def test_the_core_looks_for_a_kind_of_message_and_leaves_the_others() -> None:
    command = RunCommand(1, Resume())
    with ClientChannel("inproc://test-kinds") as front, CoreChannel("inproc://test-kinds") as core:
        assert core.receive_arrived(Shutdown, Ping) is None
        for message in (command, Ping(1), Abort(["one"]), Ping(2)):
            front.send(message)
        assert [core.receive_arrived(Shutdown, Ping) for _ in range(3)] == [Ping(1), Ping(2), None]
        assert [core.receive(1.0) for _ in range(2)] == [command, Abort(["one"])]
        assert core.receive(0.0) is None


async def test_the_core_gets_requests_of_one_message_one_by_one() -> None:
    params = PoolingParams(task="embed")
    requests = [AddRequest(str(size), np.arange(size, dtype=np.int32), params, flow="f") for size in (1, 5000, 0)]
    with ClientChannel("inproc://test-many") as front, CoreChannel("inproc://test-many") as core:
        front.send(AddRequests(requests))
        front.send(AddRequests([]))
        front.send(Ping(1))
        for sent in requests:
            received = core.receive(1.0)
            assert isinstance(received, AddRequest)
            assert (received.request_id, received.params, received.flow) == (sent.request_id, params, "f")
            assert np.array_equal(received.prompt, sent.prompt)
        assert core.receive(1.0) == Ping(1)
        assert core.receive(0.0) is None


def test_outputs_round_trip() -> None:
    logprobs = TokenLogprobs([1, 2], [-0.5, float("-inf")], [1, 2])
    output = TokensOutput("id", [1], "stop", 7, [logprobs], [None, logprobs], 16, 1.5)
    sent = StepOutput([output], StepStats(1, 2, 3, 4))
    assert MessageDecoder[CoreMessage](CoreMessage).decode(MessageEncoder().encode(sent)) == sent


@given(frames=st.lists(st.binary(max_size=40), max_size=3))
@settings(deadline=None)
def test_random_frames_are_malformed(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        MessageDecoder[ClientMessage](ClientMessage).decode(frames)


@pytest.mark.parametrize(
    ("kind", "reference", "frames"),
    [
        (1, (5, "<i4", (2,)), [b"\0" * 8]),
        (1, (1, "<i4", (3,)), [b"\0" * 8]),
        (1, (1, "unknown-dtype", (2,)), [b"\0" * 8]),
        (1, (-1, "<i4", (2,)), []),
        (2, (b"\0" * 8, "<i4", (3,)), []),
        (2, (b"\0" * 8, "unknown-dtype", (2,)), []),
        (2, (1, "<i4", (2,)), []),
        (3, (b"\0" * 8, "<i4", (2,)), []),
    ],
)
def test_arrays_that_do_not_match_their_frames_are_malformed(kind: int, reference: object, frames: list[bytes]) -> None:
    head = msgspec.msgpack.encode(
        {
            "type": "add",
            "request_id": "x",
            "prompt": msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(reference)),
            "task": {"type": "generate", "max_tokens": 1},
        }
    )
    with pytest.raises(MalformedMessage):
        MessageDecoder[ClientMessage](ClientMessage).decode([head, *frames])


def test_a_core_does_not_wait_for_a_front_end_that_has_gone() -> None:
    front = ClientChannel("inproc://test-gone")
    with CoreChannel("inproc://test-gone") as core:
        core.send(Pong(1))
        front.close()
        with pytest.raises(FrontEndClosed):
            send_forever(core)


def send_forever(core: CoreChannel) -> None:
    while True:
        core.send(Pong(2))


@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
async def test_all_address_schemes_send_in_both_directions(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = {
            "inproc": "inproc://test-transport",
            "ipc": f"ipc://{folder}/socket",
            "tcp": f"tcp://127.0.0.1:{free_port()}",
        }[scheme]
        with ClientChannel(address) as front, CoreChannel(address) as core:
            core.send(Pong(1))  # the core sends first: the front end cannot send before the core has connected
            received: asyncio.Future[CoreMessage] = asyncio.get_running_loop().create_future()
            front.listen(received.set_result)
            assert await asyncio.wait_for(received, 60) == Pong(1)
            front.send(Ping(1))
            assert await asyncio.to_thread(core.receive, 5.0) == Ping(1)
            assert core.receive(0.0) is None


@pytest.mark.parametrize("scheme", ["inproc", "ipc"])
async def test_something_can_be_read_from_the_inbox_when_a_message_has_arrived(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/socket" if scheme == "ipc" else "inproc://test-inbox"
        with ClientChannel(address) as front, CoreChannel(address) as core:
            core.send(Pong(0))  # the front end cannot send before the core has connected
            connected = asyncio.Event()
            front.listen(lambda _: connected.set())
            await asyncio.wait_for(connected.wait(), 60)
            for number in range(20):
                core.send(Pong(number))
                assert core.receive(0.0) is None
                assert select.select([core.inbox], [], [], 0.0)[0] == []
                front.send(Ping(number))
                assert (await asyncio.to_thread(select.select, [core.inbox], [], [], 30.0))[0] == [core.inbox]
                assert core.receive(0.0) == Ping(number)


def test_a_core_that_waits_is_woken() -> None:
    with CoreChannel("inproc://nobody") as channel:
        wake = channel.waker()
        for _ in range(3):
            wake()
        assert channel.receive(None) is None
        assert channel.receive(0.001) is None  # it was woken once for all three
        threading.Timer(0.01, wake).start()
        assert channel.receive(None) is None
    wake()  # a thread may not know that the channel is closed

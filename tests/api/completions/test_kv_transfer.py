"""`kv_transfer_params`: what a router asks a prefiller and a decoder for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from quire.engine.client.kv_transfer import KVTransferInfo, RemoteBlocks
from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import INFO, FakeCore
from tests.support.server import running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
READ = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "a",
    "remote_request_id": "b",
    "remote_block_ids": [1, 2, 3],
    "remote_host": "10.0.0.5",
    "remote_port": 14579,
    "remote_num_tokens": 5,
    "remote_blocks_expiry_time": 1.5,
    "tp_size": 1,
}


def core(*, sends: bool = True, receives: bool = True) -> FakeCore:
    transfer = KVTransferInfo(sends=sends, receives=receives, allowed_hosts=("10.0.0.0/8", "prefill"))
    return FakeCore(info=structs.replace(INFO, kv_transfer=transfer))


async def test_the_engine_gets_what_a_router_passes_on(tmp_path: Path) -> None:
    fake = core()
    async with running_server(tmp_path, fake) as server:
        for params in ({**HOLD}, READ, {**READ, "remote_host": "prefill"}, None, {}, {"do_remote_decode": False}):
            body = {"prompt": "hello", "max_tokens": 1, "kv_transfer_params": params}
            answer = await server.post(COMPLETIONS, body)
            assert answer.status_code == 200, answer.text
            assert "x-quire-ignored-fields" not in answer.headers
    asked = [message for message in fake.received if isinstance(message, AddRequest)]
    assert [message.is_held for message in asked] == [True, False, False, False, False, False]
    expected = RemoteBlocks(engine_id="a", host="10.0.0.5", port=14579, request_id="b", num_tokens=5)
    assert [message.remote for message in asked] == [
        None,
        expected,
        structs.replace(expected, host="prefill"),
        None,
        None,
        None,
    ]
    assert asked[0].flow


@pytest.mark.parametrize(
    ("params", "fields", "param"),
    [
        (HOLD, {"max_tokens": 2}, "max_tokens"),
        (HOLD, {"max_tokens": None}, "max_tokens"),
        (HOLD, {"stream": True}, "stream"),
        (HOLD, {"n": 2}, "n"),
        (HOLD, {"prompt": ["a", "b"]}, "prompt"),
        (HOLD, {"use_beam_search": True}, "use_beam_search"),
        (READ, {"n": 2}, "n"),
        ({**READ, **HOLD, "do_remote_prefill": True}, {}, "kv_transfer_params.do_remote_decode"),
        ({**READ, "remote_host": "10.0.0.5.example"}, {}, "kv_transfer_params.remote_host"),
        ({**READ, "remote_host": "127.0.0.1"}, {}, "kv_transfer_params.remote_host"),
        ({**READ, "remote_host": None}, {}, "kv_transfer_params.remote_host"),
        ({**READ, "remote_port": 1 << 16}, {}, "kv_transfer_params.remote_port"),
        ({**READ, "remote_port": None}, {}, "kv_transfer_params.remote_port"),
        ({**READ, "remote_request_id": ""}, {}, "kv_transfer_params.remote_request_id"),
        ({**READ, "remote_num_tokens": -1}, {}, "kv_transfer_params.remote_num_tokens"),
        ({**READ, "tp_size": 2}, {}, "kv_transfer_params.tp_size"),
        ("x", {}, "kv_transfer_params"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, params: Any, fields: dict[str, Any], param: str
) -> None:
    async with running_server(tmp_path, core()) as server:
        body = {"prompt": "hello", "max_tokens": 1, "kv_transfer_params": params, **fields}
        answer = await server.post(COMPLETIONS, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fake", "params", "role"),
    [
        (FakeCore(), HOLD, "kv_producer or kv_both"),
        (FakeCore(), READ, "kv_consumer or kv_both"),
        (core(sends=False), HOLD, "kv_producer or kv_both"),
        (core(receives=False), READ, "kv_consumer or kv_both"),
    ],
)
async def test_a_server_without_the_role_says_which_it_needs(
    tmp_path: Path, path: str, fake: FakeCore, params: dict[str, Any], role: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    async with running_server(tmp_path, fake) as server:
        answer = await server.post(path, {**prompt, "max_tokens": 1, "kv_transfer_params": params})
        assert answer.status_code == 400
        assert role in answer.json()["error"]["message"]


async def test_fields_that_are_not_known_are_named(tmp_path: Path) -> None:
    async with running_server(tmp_path, core()) as server:
        params = {**READ, "remote_bootstrap_addr": "x"}
        answer = await server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "kv_transfer_params": params})
        assert answer.headers["x-quire-ignored-fields"] == "kv_transfer_params.remote_bootstrap_addr"


async def test_responses_have_the_field(tmp_path: Path) -> None:
    fake = core()
    async with running_server(tmp_path, fake) as server:
        for params in (HOLD, READ):
            body = {"input": "x", "max_output_tokens": 1, "kv_transfer_params": params}
            answer = await server.post("/v1/responses", body)
            assert answer.status_code == 200, answer.text
        refused = await server.post("/v1/responses", {"input": "x", "kv_transfer_params": HOLD})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_output_tokens"
    held, read = (message for message in fake.received if isinstance(message, AddRequest))
    assert held.is_held
    assert read.remote is not None


async def test_messages_have_the_field(tmp_path: Path) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    fake = core()
    async with running_server(tmp_path, fake) as server:
        for params in (HOLD, READ):
            answer = await server.post("/v1/messages", {**body, "kv_transfer_params": params})
            assert answer.status_code == 200, answer.text
        refused = await server.post("/v1/messages", {**body, "max_tokens": 2, "kv_transfer_params": HOLD})
        assert refused.status_code == 400
    held, read = (message for message in fake.received if isinstance(message, AddRequest))
    assert held.is_held
    assert read.remote is not None
    assert read.remote.host == "10.0.0.5"

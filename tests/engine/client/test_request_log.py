"""Prompts and answers in the log, for operators who ask for them: cut, and with the id of the HTTP request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.origin import Origin
from quire.engine.client.request_log import RequestLog
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from tests.support.fake_core import FakeCore, prompt_of, running_client
from tests.support.tokenizer import EOS, byte_tokenizer


async def generate(client: EngineClient, text: str, **fields: Any) -> None:
    params = SamplingParams(max_tokens=50, eos_token_ids=(EOS,), temperature=0.5)
    request = GenerateRequest(prompt=prompt_of(text), params=params, origin=Origin("mine"), **fields)
    async for _ in client.generate(request):
        pass


@pytest.mark.parametrize("has_outputs", [False, True])
async def test_requests_and_answers_are_logged_and_cut(has_outputs: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.requests")
    async with running_client(FakeCore()) as client:
        await generate(client, "unseen")
        client.request_log = RequestLog(byte_tokenizer(), 5, has_outputs=has_outputs)
        await generate(client, "unseen", is_search_step=True)
        await generate(client, "abcdefgh\n")
    records = [record.__dict__ for record in caplog.records]
    assert len(records) == 1 + has_outputs
    assert {record["request_id"] for record in records} == {"mine"}
    asked, *answers = (record["fields"] for record in records)
    assert (asked["prompt"], asked["prompt_tokens"], asked["params"]) == ("abcde", 9, "tempe")
    for answer in answers:
        assert (answer["output"], answer["finish_reason"]) == ("ABCDE", "stop")
        assert answer["engine_request_id"] == asked["engine_request_id"]


async def test_only_parameters_that_are_set_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.requests")
    async with running_client(FakeCore()) as client:
        client.request_log = RequestLog(byte_tokenizer(), 1000, has_outputs=False)
        await generate(client, "a\nb")
    (record,) = caplog.records
    assert record.__dict__["fields"]["params"] == f"temperature=0.5, max_tokens=50, eos_token_ids=({EOS},)"
    assert r"prompt 'a\nb', 3 tokens" in record.getMessage()

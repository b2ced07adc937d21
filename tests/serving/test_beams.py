"""Beam search finds what transformers' finds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import serve_core
from quire.engine.client.model_info import Generates
from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.engine.models.model_config import read_model_config
from quire.rendering.tokenizer import Tokenizer
from quire.serving.beams.collect import collect_answers
from quire.serving.beams.options import BeamOptions
from quire.serving.beams.search import BeamSearch
from tests.support.fake_core import INFO, FakeCore, running_client, says
from tests.support.models import make_model, save_model
from tests.support.observers import Records
from tests.support.server import running_server
from tests.support.tokenizer import VOCAB_SIZE, byte_tokenizer, write_tokenizer

PROMPT = [17, 5, 120, 33, 64, 9]
ENDS = (3, 77, 140)  # so many that beams end at different lengths


def options(width: int, penalty: float = 1.0, ends: tuple[int, ...] = ENDS, **fields: Any) -> BeamOptions:
    return BeamOptions(width, penalty, frozenset(ends), frozenset(), None, **fields)


@pytest.mark.parametrize(
    ("width", "penalty", "tokens"),
    [(1, 1.0, 9), (2, 1.0, 9), (4, 0.0, 9), (4, 1.0, 9), (4, 1.0, 3), (4, 2.0, 9), (5, -1.0, 9), (8, 1.0, 1)],
)
async def test_the_answers_are_those_of_transformers(tmp_path: Path, width: int, penalty: float, tokens: int) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[list(ENDS)] *= 2.0
    folder = save_model(model, tmp_path)
    write_tokenizer(folder)
    expected = model.generate(
        torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, length_penalty=penalty, do_sample=False,
        max_new_tokens=tokens, eos_token_id=list(ENDS), pad_token_id=VOCAB_SIZE - 1,
    )[:, len(PROMPT) :]  # fmt: skip
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(dtype="float32"),
        engine=EngineOptions(kv_cache_memory_bytes=16 << 20, max_num_seqs=8),
    )
    request = GenerateRequest(prompt=np.array(PROMPT, np.int32), params=SamplingParams(max_tokens=tokens))
    async with running_client(partial(serve_core, config)) as client:
        tokenizer = Tokenizer.load(folder)
        client.observers.add(records := Records())
        answers = await collect_answers(client, [request] * width, options(width, penalty), tokenizer)
        assert {record.is_search_step for record in records.records} == {True}
        assert all(record.times.last_token <= record.times.sent for record in records.records)
        async for _ in client.generate(request):
            pass
        assert not records.records[-1].is_search_step
    expected_tokens = [[token for token in row if token != VOCAB_SIZE - 1] for row in expected.tolist()]
    assert [answer.total.token_ids for answer in answers] == expected_tokens
    assert [answer.total.finish_reason for answer in answers] == [
        "stop" if row[-1] in ENDS else "length" for row in expected_tokens
    ]


def test_the_search_ends_once_nothing_can_be_better() -> None:
    search = BeamSearch(options(2, ends=(0,)), max_tokens=100)
    search.advance([TokenLogprobs([1, 0, 1, 2], [-0.7, -0.1, -0.7, -2.0], [2, 1, 2, 3])])
    assert [beam.tokens for beam in search.running] == [(1,), (2,)]
    search.advance([TokenLogprobs([1, 0, 1], [-0.1, -0.1, -3.0], [1, 1, 2])] * 2)
    assert not search.running
    assert [beam.tokens for _, beam in search.best] == [(0,), (1, 0)]


async def test_beams_of_a_prefix_language_model_are_refused(tmp_path: Path) -> None:
    """The engine would read them as parts of the prompt, whose tokens attend in both directions."""
    info = msgspec.structs.replace(INFO, kind=Generates(longest_prompt=100))
    async with running_server(tmp_path, FakeCore(info=info)) as server:
        for fields in ({}, {"use_beam_search": True}):
            answer = await server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2, **fields})
            assert answer.status_code == (400 if fields else 200)
        assert answer.json()["error"]["param"] == "use_beam_search"


async def test_requests_for_beams_are_answered(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("a"))) as server:
        fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0.5}
        completion = {"prompt": ["ab", "cd"], "echo": True, "return_metrics": True, **fields}
        answer = await server.post("/v1/completions", completion)
        assert answer.headers["x-quire-ignored-fields"] == "temperature"
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"][:2] for choice in choices] == ["ab", "ab", "cd", "cd"]
        assert answer.json()["usage"]["completion_tokens"] == 12
        messages = [{"role": "user", "content": "hi"}]
        chat = {"messages": messages, "logprobs": True, "top_logprobs": 1, "length_penalty": 0.5, **fields}
        first, second = (await server.post("/v1/chat/completions", chat)).json()["choices"]
        assert first["message"]["content"] != second["message"]["content"]
        for choice in (first, second):
            entries = choice["logprobs"]["content"]
            assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
            assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1, 1]
        (a,) = byte_tokenizer().encode("a").ids
        stopped = {"prompt": "x", "use_beam_search": True, "stop_token_ids": [a]}
        (choice,) = (await server.post("/v1/completions", stopped)).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", a)
        late = await server.post("/v1/completions", {"prompt": "a", "timeout": 0.001, **fields, "max_tokens": 400})
        assert late.status_code == 408
        assert "0.001 seconds" in late.json()["error"]["message"]
        body = {"messages": messages, "use_beam_search": True}
        assert (await server.post("/v1/chat/completions/render", body)).status_code == 400

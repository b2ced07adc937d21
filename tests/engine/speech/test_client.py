"""Items and pieces of prompts on their way through client, transport and a real core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import serve_core
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.model_info import Transcribes
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import TokenArray
from quire.engine.client.sampling_params import TokenProbs
from quire.engine.client.stream import Delta, GenerateRequest, PoolRequest
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.fake_core import running_client
from tests.support.models import make_model, save_model
from tests.support.whisper import ENGLISH, GERMAN, START, TRANSCRIBE, item


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[EngineClient]:
    """A client of a core in a thread that runs the model in float32."""
    options = EngineOptions(kv_cache_memory_bytes=64 << 20, max_num_seqs=8)
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(dtype="float32"),
        engine=options,
    )
    async with running_client(partial(serve_core, config)) as client:
        yield client


def ids(*tokens: int) -> TokenArray:
    return np.array(tokens, np.int32)


async def read(client: EngineClient, request: GenerateRequest) -> list[Delta]:
    async with aclosing(client.generate(request)) as deltas:
        return [delta async for delta in deltas]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_items_and_probabilities(whisper_folder: Path) -> None:
    prompt, token_probs = ids(START, ENGLISH, TRANSCRIBE), TokenProbs(0, (ENGLISH, GERMAN))
    params = greedy(5, token_probs=token_probs)
    async with serving(whisper_folder) as client:
        info = await client.ready()
        assert isinstance(info.kind, Transcribes)
        assert info.kind.start_token == START
        requests = [GenerateRequest(prompt=prompt, params=params, items=(item(seed),)) for seed in (1, 2, 1)]
        answers = await asyncio.gather(*(read(client, request) for request in requests))
        task = PoolingParams(task="align", skip_tokens=3, num_positions=20)
        aligned = await client.pool(PoolRequest(prompt=ids(*prompt, 7, 8), params=task, items=(item(1),)))
    assert aligned.data.shape == (2, 20)
    engine = Engine(whisper_folder)
    for seed, deltas in zip((1, 2, 1), answers, strict=True):
        expected = engine.generate(prompt.tolist(), params, items=(item(seed),))
        assert tokens_of(deltas) == expected.tokens
        probs = np.array([delta.token_probs for delta in deltas if delta.token_probs is not None])
        np.testing.assert_allclose(probs, np.array([expected.outputs[0].token_probs]), atol=1e-5)


async def test_a_prompt_in_pieces(tmp_path: Path) -> None:
    """While the engine waits for a piece, it is idle, and answers others."""
    folder = save_model(make_model("llama"), tmp_path)
    prompt = random_prompt(1, 30)
    async with serving(folder) as client:
        request = GenerateRequest(prompt=ids(*prompt[:4]), params=greedy(6), open=True, request_id="mine")
        reading = asyncio.create_task(read(client, request))
        await asyncio.sleep(0)
        for begin in range(4, 30, 13):
            other = await read(client, GenerateRequest(prompt=ids(*prompt[:9]), params=greedy(3)))
            assert len(tokens_of(other)) == 3
            assert not reading.done()
            client.extend("mine", ids(*prompt[begin : begin + 13]), last=begin + 13 >= 30)
        assert tokens_of(await reading) == Engine(folder).generate(prompt, greedy(6)).tokens

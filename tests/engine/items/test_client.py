"""Items on their way through client, transport and a real core, whole and with pieces of prompts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import serve_core
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.model_info import Generates
from quire.engine.client.stream import GenerateRequest
from quire.engine.models.model_config import read_model_config
from tests.support.audio_models import noise, prompt_with
from tests.support.engine import Engine, greedy
from tests.support.fake_core import running_client


async def read(client: EngineClient, request: GenerateRequest) -> list[int]:
    async with aclosing(client.generate(request)) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


async def test_items_through_the_client(audio_folders: dict[str, Path]) -> None:
    folder = audio_folders["voxtral"]
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(dtype="float32"),
        engine=EngineOptions(kv_cache_memory_bytes=64 << 20, max_num_seqs=8),
    )
    async with running_client(partial(serve_core, config)) as client:
        info = await client.ready()
        assert info.tasks == ("generate", "transcribe")
        assert isinstance(info.kind, Generates)
        assert info.kind.audio is not None
        prompt, items = prompt_with(info.kind.audio, [1, 2], noise(0, 1.4), [3])
        tokens = np.array(prompt, np.int32)
        whole = await read(client, GenerateRequest(prompt=tokens, params=greedy(8), items=items))
        request = GenerateRequest(prompt=tokens[:2], params=greedy(8), open=True, request_id="mine")
        reading = asyncio.create_task(read(client, request))
        await asyncio.sleep(0)
        for item in items:
            piece = tokens[item.start : item.start + item.length]
            client.extend("mine", piece, items=(msgspec.structs.replace(item, start=0),))
        client.extend("mine", tokens[-1:], last=True)
        assert await reading == whole
    assert whole == Engine(folder).generate(prompt, greedy(8), items=items).tokens

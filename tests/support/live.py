"""Models that transcribe audio while it arrives, behind the endpoints: what holds for each kind of them."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import serve_core
from quire.engine.models.model_config import read_model_config
from tests.support.audio import Samples, wav
from tests.support.realtime import Client, at_24k, client_of, session_of, silence, speech
from tests.support.server import Server, running_server, until

DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
FRAME = 1280  # samples


@asynccontextmanager
async def core_server(
    folder: Path, max_model_len: int | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    """A server of the model in a folder, in float32, whose engine is a thread.

    `settings` are those of `quire serve`, `options` the engine's.
    """
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(dtype="float32", max_model_len=max_model_len),
        engine=EngineOptions(**{"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "num_threads": 1, **options}),
    )
    core = partial(serve_core, config)
    async with running_server(folder, core, write=lambda _: None, **settings or {}) as server:
        yield server


def read(samples: Samples) -> Samples:
    """Samples as the server gets them, from a file of 16 bits."""
    resampled: Samples = soundfile.read(io.BytesIO(wav(samples[:, None])), dtype="float32")[0]
    return resampled


def as_pcm(samples: Samples) -> NDArray[np.int16]:
    """The 16 bits of the samples of such a file."""
    return np.round(read(samples) * 32768).astype(np.int16)


async def transcribed(server: Server, samples: Samples, path: str = "transcriptions", **fields: Any) -> Any:
    """The response to a file."""
    files = {"file": ("a.wav", wav(samples[:, None]))}
    return await server.http.post(f"/v1/audio/{path}", files=files, data={"model": "fake", **fields})


async def left_nothing(server: Server) -> None:
    """The engine holds nothing, and no place is taken."""
    client = server.state.models[0].client
    await until(lambda: client.stats.running == client.stats.waiting == client.stats.blocks_used == 0)
    await until(lambda: client.slots_in_use == client.open_streams == 0)


@asynccontextmanager
async def vllm_session(server: Server) -> AsyncIterator[Client]:
    """A client of a session in vLLM's dialect."""
    async with client_of(server, "") as client:
        await client.expect("session.created")
        await client.send("session.update", model="fake")
        yield client


async def check_deltas(server: Server, dialect: str) -> None:
    """The first ones come before the rest of the audio is sent; together they are the transcript."""
    delta, done = (DELTA, COMPLETED) if dialect != "vllm" else ("transcription.delta", "transcription.done")
    if dialect == "vllm":
        session = vllm_session(server)
    elif dialect == "ga":
        session = session_of(server)
    else:
        session = client_of(server, "?intent=transcription", additional_headers={"OpenAI-Beta": "realtime=v1"})
    async with session as client:
        rate = 24_000 if dialect == "beta" else 16_000
        convert = at_24k if dialect == "beta" else np.asarray
        audio = convert(speech(3.0))
        await client.append(convert(silence(0.5)), rate=rate)
        await client.append(audio[: rate * 2], rate=rate)
        events = await client.until(delta)
        assert done not in {event["type"] for event in events}
        await client.append(audio[rate * 2 :], rate=rate)
        await client.append(convert(silence(1.5)), rate=rate)
        if dialect == "vllm":
            await client.send("input_audio_buffer.commit", final=True)
        events += await client.until(done)
        text = events[-1]["text" if dialect == "vllm" else "transcript"]
        assert "".join(event["delta"] for event in events if event["type"] == delta).strip() == text
        assert len(text) > 10
    await left_nothing(server)


async def check_cleared_and_killed_sessions(server: Server) -> None:
    """They leave nothing in the engine. The model must not end a text before its audio ends."""
    engine = server.state.models[0].client
    async with session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(2.0)]))
        await client.until(DELTA)
        assert engine.open_streams == 1
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await left_nothing(server)
        await client.append(np.concatenate([silence(0.5), speech(1.0), silence(1.0)]))
        assert (await client.until(COMPLETED))[-1]["transcript"]
    async with session_of(server) as first, session_of(server) as other:
        for client in (first, other):
            await client.append(np.concatenate([silence(0.5), speech(2.0)]))
        await first.until(DELTA)
        await other.until(DELTA)
        first.connection.transport.abort()
        await until(lambda: engine.open_streams == 1)
        await other.append(np.concatenate([speech(0.5), silence(1.0)]))
        assert (await other.until(COMPLETED))[-1]["transcript"]
    await until(lambda: server.sessions.running == 0)
    await left_nothing(server)


async def check_death(server: Server) -> None:
    """An engine that dies fails the utterance. The model must not end a text before its audio ends."""
    async with session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.5)]))
        await client.until(DELTA)
        server.state.models[0].client.fail("told to die")
        await client.append(silence(1.0))
        failed = await client.until("conversation.item.input_audio_transcription.failed")
        assert failed[-1]["error"]["type"] == "server_error"
        await client.expect("conversation.item.done")
        await client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.cleared")

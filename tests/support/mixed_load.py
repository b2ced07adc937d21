"""Requests of all kinds at a server of the bundled models, also such that fail."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soundfile
from PIL import Image
from websockets.asyncio.client import connect

from tests.support.keys import bearer
from tests.support.patience import PATIENCE
from tests.support.realtime import Client, silence

CHAT = "/v1/chat/completions"
RECORDING = Path(__file__).parents[1] / "app" / "recordings" / "english.flac"
QUESTIONS = ("What is 27 + 58?", "What is Quire?", "My name is Ada. What is my name?", "Tell me about prefix caching.")
BURST = 24  # more than the queue of `ARGUMENTS` holds
# The settings of a server with which each metric moves, beside a file of `KEYS`.
ARGUMENTS = (
    *("--speculative-method", "ngram", "--max-num-seqs", "8", "--max-num-queued-seqs", "8"),
    *("--max-client-share", "1", "--kv-cache-metrics", "--kv-cache-metrics-sample", "1"),
)
KEYS: dict[str, dict[str, Any]] = {"load": {}, "limited": {"requests_per_minute": 1}}


class MixedLoad:
    """Clients that send requests one after the other until the time is over.

    Args:
        url: the server's address.
        seconds: for how long new requests begin.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._end = time.monotonic() + seconds
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Send everything."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE, limits=limits, headers=bearer("load")
        ) as self._http:
            clients: tuple[tuple[Callable[[], Awaitable[Any]], float], ...] = (
                (self._stream, 0.0),
                (self._stream, 0.2),
                (self._choices, 0.3),
                (self._fresh, 0.1),
                (self._structured, 0.5),
                (self._tools, 0.5),
                (self._embeddings, 0.3),
                (self._transcription, 1.0),
                (self._session, 2.0),
                (self._picture, 0.5),
                (self._mistakes, 1.0),
                (self._aborted, 1.0),
                (self._burst, 5.0),
                (self._limited, 1.0),
            )
            async with asyncio.TaskGroup() as tasks:
                for send, pause in clients:
                    tasks.create_task(self._repeat(send, pause))

    async def _repeat(self, send: Callable[[], Awaitable[Any]], pause: float) -> None:
        while time.monotonic() < self._end:
            with suppress(httpx.TransportError):  # a connection that the server closes while it is idle
                await send()
            await asyncio.sleep(pause)

    def _chat(self, **fields: Any) -> dict[str, Any]:
        """A body, with one of the questions: some prompts repeat."""
        question = QUESTIONS[next(self._numbers) % len(QUESTIONS)]
        return {"model": "quire-nano", "messages": [{"role": "user", "content": question}], **fields}

    async def _stream(self) -> None:
        async with self._http.stream("POST", CHAT, json=self._chat(stream=True, max_tokens=200)) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def _choices(self) -> None:
        await self._http.post(CHAT, json=self._chat(n=2, max_tokens=40, temperature=1.0))

    async def _fresh(self) -> None:
        """A long prompt that no other begins with, so that blocks leave the prefix cache."""
        words = " ".join(str(next(self._numbers) * 7919) for _ in range(60))
        await self._http.post(CHAT, json={**self._chat(max_tokens=2), "messages": [{"role": "user", "content": words}]})

    async def _structured(self) -> None:
        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        await self._http.post(CHAT, json=self._chat(response_format=form, max_tokens=40))

    async def _tools(self) -> None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
        body = self._chat(tools=[tool], max_tokens=60)
        body["messages"] = [{"role": "user", "content": "What is the weather in Paris?"}]
        await self._http.post(CHAT, json=body)

    async def _embeddings(self) -> None:
        body = {"model": "quire-nano-embed", "input": [*QUESTIONS, f"text {next(self._numbers)}"]}
        await self._http.post("/v1/embeddings", json=body)

    async def _transcription(self) -> None:
        files = {"file": ("a.flac", RECORDING.read_bytes())}
        await self._http.post("/v1/audio/transcriptions", files=files, data={"model": "quire-nano-hear"})

    async def _session(self) -> None:
        samples, rate = soundfile.read(RECORDING, dtype="int16")
        url = self._url.replace("http", "ws") + "/v1/realtime?model=quire-nano-hear"
        async with connect(url, compression=None, max_size=None, additional_headers=bearer("load")) as connection:
            client = Client(connection)
            await client.expect("session.created")
            await client.update(format={"type": "audio/pcm", "rate": rate})
            await client.append(np.concatenate([samples, silence(1.0)]), rate=rate)
            await client.until(
                *(f"conversation.item.input_audio_transcription.{end}" for end in ("completed", "failed"))
            )

    async def _picture(self) -> None:
        """A picture of one of three colors, so that caches have some."""
        color = ("red", "green", "blue")[next(self._numbers) % 3]
        file = io.BytesIO()
        Image.new("RGB", (128, 128), color).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
        body = {"model": "quire-nano-see", "messages": [{"role": "user", "content": parts}], "max_tokens": 20}
        await self._http.post(CHAT, json=body)

    async def _mistakes(self) -> None:
        await self._http.post(CHAT, json=self._chat(max_tokens=-1))
        await self._http.get("/v1/nowhere")

    async def _aborted(self) -> None:
        async with self._http.stream(
            "POST", CHAT, json=self._chat(stream=True, ignore_eos=True, max_tokens=400)
        ) as answer:
            async for _ in answer.aiter_bytes():
                break

    async def _burst(self) -> None:
        """More than the queue holds: some get status 503."""
        bodies = [self._chat(max_tokens=60, ignore_eos=True) for _ in range(BURST)]
        await asyncio.gather(*(self._http.post(CHAT, json=body) for body in bodies))

    async def _limited(self) -> None:
        """More than its key may send."""
        await self._http.get("/v1/models", headers=bearer("limited"))

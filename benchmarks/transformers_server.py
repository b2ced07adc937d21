"""Serves completions by `generate` of transformers, to compare with models that its own server does not batch.

    python -m benchmarks.transformers_server FOLDER --port 8000 --name bench

`transformers serve` batches with pages of keys and values alone, so it answers hybrids one after another. Here requests
that arrive together, with as many prompt tokens and as many tokens to generate, are one batch: `generate` is called
once, and nothing is padded. Answers are streamed token by token, and none ends before its last token. It has what the
shared load.py and `benchmarks.gguf_peers` ask for, and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TOGETHER = 0.03  # seconds without another request after which a batch is computed
LARGEST = 16  # requests of a batch


@dataclass
class Completion:
    """A request, and the tokens that were generated for it; None follows the last."""

    prompt: list[int]
    tokens: int
    generated: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)


class Batches:
    """Computes the completions that arrive, those that arrive together at once."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._waiting: list[Completion] = []
        self._arrived = asyncio.Event()

    def add(self, completion: Completion) -> None:
        """Compute a completion in one of the next batches."""
        self._waiting.append(completion)
        self._arrived.set()

    async def run(self) -> None:
        """Compute batches, one after another, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._all_arrived()
            shape = self._shape(self._waiting[0])
            batch = [completion for completion in self._waiting if self._shape(completion) == shape][:LARGEST]
            self._waiting = [completion for completion in self._waiting if completion not in batch]
            await loop.run_in_executor(None, self._generate, batch, loop)

    async def _all_arrived(self) -> None:
        """Return when there are requests, and no other one follows at once."""
        while not self._waiting or self._arrived.is_set():
            if not self._waiting:
                await self._arrived.wait()
            self._arrived.clear()
            await asyncio.sleep(TOGETHER)

    @staticmethod
    def _shape(completion: Completion) -> tuple[int, int]:
        return len(completion.prompt), completion.tokens

    def _generate(self, batch: list[Completion], loop: asyncio.AbstractEventLoop) -> None:
        prompts = torch.tensor([completion.prompt for completion in batch])
        with torch.inference_mode():
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=batch[0].tokens,
                do_sample=False,
                streamer=Streamer(batch, loop),
            )


class Streamer:
    """Gives each completion of a batch its tokens, by the methods that `generate` calls."""

    def __init__(self, batch: list[Completion], loop: asyncio.AbstractEventLoop) -> None:
        self._batch, self._loop = batch, loop
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        """Pass the next token of each on; first come the prompts."""
        if self._has_prompts:
            self._loop.call_soon_threadsafe(self._pass_on, value.tolist())
        self._has_prompts = True

    def end(self) -> None:
        """Tell all that this was their last token."""
        self._loop.call_soon_threadsafe(self._pass_on, [None] * len(self._batch))

    def _pass_on(self, tokens: Sequence[int | None]) -> None:
        for completion, token in zip(self._batch, tokens, strict=True):
            completion.generated.put_nowait(token)


def app_of(folder: Path, name: str, dtype: str) -> FastAPI:
    """Return the application."""
    app, tokenizer = FastAPI(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches = Batches(folder, dtype)
    running: set[asyncio.Task[None]] = set()  # the event loop keeps no reference

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": name}]}

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        prompt = body["prompt"]
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else prompt
        completion = Completion(ids, body["max_tokens"])
        if not running:
            running.add(asyncio.create_task(batches.run()))
        batches.add(completion)
        return StreamingResponse(_events(completion, tokenizer), media_type="text/event-stream")

    return app


async def _events(completion: Completion, tokenizer: Tokenizer) -> AsyncIterator[str]:
    """Yield the events of an answer, and its usage."""
    while (token := await completion.generated.get()) is not None:
        yield _event({"choices": [{"index": 0, "text": tokenizer.decode([token]) or " ", "finish_reason": None}]})
    usage = {"prompt_tokens": len(completion.prompt), "completion_tokens": completion.tokens}
    yield _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def main() -> None:
    """Serve a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="bench", help="of the model in requests")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    uvicorn.run(app_of(options.model, options.name, options.dtype), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()

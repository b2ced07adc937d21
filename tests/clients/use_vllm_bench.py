"""What `vllm bench serve` does: the server's tokenizer, then many streams with exact numbers of tokens."""
# needs: aiohttp>=3.11,<4 transformers>=5,<6

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
from questions import MODEL, URL
from transformers import AutoTokenizer

SERVER = URL.removesuffix("/v1")
INPUT, OUTPUT, REQUESTS = 32, 24, 12


async def stream(session: aiohttp.ClientSession, path: str, body: dict) -> tuple[str, dict]:
    """The text and the token counts of a streamed answer."""
    options = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    sampling = {"temperature": 0.0, "repetition_penalty": 1.0}
    headers = {"Authorization": "Bearer none", "x-request-id": f"bench-{random.random()}"}
    text, usage, ended = "", {}, False
    async with session.post(f"{URL}/{path}", json={**options, **sampling, **body}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data.startswith(":"):
                continue
            if ended := data == "[DONE]":
                break
            chunk = json.loads(data)
            for choice in chunk["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            usage = chunk.get("usage") or usage
    assert ended
    return text, usage


async def main() -> None:
    """Completions and chats."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{SERVER}/health") as health:
            assert health.status == 200
        async with session.get(f"{URL}/models") as models:
            model, *_ = (await models.json())["data"]  # the first one, as `vllm bench serve` without --model
        tokenizer = AutoTokenizer.from_pretrained(model["root"])
        words = tokenizer.encode("What is the weather in Paris, and what is 27 + 58?", add_special_tokens=False)
        prompts = [tokenizer.decode(random.Random(i).choices(words, k=INPUT)) for i in range(REQUESTS)]
        completions = [
            stream(session, "completions", {"prompt": prompt, "max_tokens": OUTPUT, "logprobs": None})
            for prompt in prompts
        ]
        chats = [
            stream(
                session,
                "chat/completions",
                {
                    "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
                    "max_completion_tokens": OUTPUT,
                },
            )
            for prompt in prompts
        ]
        for prompt, (text, usage) in zip(prompts * 2, await asyncio.gather(*completions, *chats), strict=True):
            assert text
            assert usage["completion_tokens"] == OUTPUT, usage
            assert usage["prompt_tokens"] >= len(tokenizer.encode(prompt, add_special_tokens=False)), usage
        async with session.get(f"{SERVER}/metrics") as metrics:
            assert "request_success_total{" in await metrics.text()


asyncio.run(main())

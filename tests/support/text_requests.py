"""Requests for text to an engine's client, and their answers."""

from __future__ import annotations

from quire.engine.client.detokenizer import TextParams
from quire.engine.client.engine import Engine
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import Delta, GenerateRequest
from tests.support.fake_core import prompt_of
from tests.support.tokenizer import EOS


def text_request(text: str = "hello", *, max_tokens: int = 100, **text_params: object) -> GenerateRequest:
    """A request for text that ends at the end of the sequence; `text_params` are those of its text."""
    params = SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,))
    return GenerateRequest(prompt=prompt_of(text), params=params, text=TextParams(**text_params))  # type: ignore[arg-type]


async def collect(client: Engine, request: GenerateRequest) -> tuple[str, Delta]:
    """The whole text of a request, and its last delta."""
    text = ""
    async for delta in client.generate(request):
        text += delta.text
    return text, delta

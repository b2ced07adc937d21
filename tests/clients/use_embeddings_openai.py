"""OpenAI's client: embeddings as base64, which is its default, as floats, and shortened ones that are refused."""
# needs: openai>=3.50,<4

from __future__ import annotations

import openai
from texts import EMBEDDER, TEXTS, URL, close, expected

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
vectors = expected(TEXTS)
for fields in ({}, {"encoding_format": "float"}):
    answer = client.embeddings.create(model=EMBEDDER, input=TEXTS, **fields)
    assert close([entry.embedding for entry in answer.data], vectors)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
many = client.embeddings.create(model=EMBEDDER, input=[f"text {i}" for i in range(2048)])
assert [entry.index for entry in many.data] == list(range(2048))
try:
    client.embeddings.create(model=EMBEDDER, input=["x"] * 2049)
    refusal = ""
except openai.BadRequestError as error:
    refusal = str(error)
assert "2048" in refusal

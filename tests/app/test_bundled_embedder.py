"""The bundled embedder, served beside quire-nano by plain `quire serve`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.support.patience import PATIENCE
from tests.support.process import serving

NAME = "quire-nano-embed"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as running:
        yield running.url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as opened:
        yield opened


def embed(client: openai.OpenAI, *texts: str) -> NDArray[np.float64]:
    answer = client.embeddings.create(model=NAME, input=list(texts))
    return np.array([item.embedding for item in answer.data])


def test_all_models_are_listed_with_their_tasks(server: str) -> None:
    tasks = {card["id"]: card["tasks"] for card in httpx.get(f"{server}/v1/models", timeout=PATIENCE).json()["data"]}
    assert tasks == {
        "quire-nano": ["generate"],
        NAME: ["embed", "token_embed", "score"],
        "quire-nano-hear": ["transcribe"],
        "quire-nano-see": ["generate"],
    }


def test_texts_that_mean_the_same_are_near(client: openai.OpenAI) -> None:
    question, same, other = embed(
        client,
        "How do I install Quire?",
        "What are the steps to install Quire?",
        "My cat is called Minka and she is four years old.",
    )
    assert np.allclose(np.linalg.norm(question), 1, atol=1e-3)
    assert question @ same > question @ other + 0.2


def test_embeddings_without_a_model_name_go_to_the_embedder(server: str) -> None:
    answer = httpx.post(f"{server}/v1/embeddings", json={"input": "hello", "dimensions": 64}, timeout=PATIENCE).json()
    assert answer["model"] == NAME
    assert len(answer["data"][0]["embedding"]) == 64


def test_rerank_puts_the_answer_first(server: str) -> None:
    documents = ["It rains in Oslo.", "The order 4412 was shipped on Monday.", "Anna is 31 years old."]
    body = {"query": "When was order 4412 shipped?", "documents": documents}
    results = httpx.post(f"{server}/rerank", json=body, timeout=PATIENCE).json()["results"]
    assert results[0]["index"] == 1


def test_each_model_refuses_what_it_cannot_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="generate"):
        client.embeddings.create(model="quire-nano", input="hello")

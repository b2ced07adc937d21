"""The texts that every client of embeddings sends, and what the server says about them without a client."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1]
SERVER = URL.removesuffix("/v1")
TEXTS = ["The cat sat on the mat.", "Paris is the capital of France.", "Bread is made of flour."]
QUERY = "What is the capital of France?"


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{SERVER}{path}", data, {"content-type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)


def model_with(task: str) -> str:
    """The name of a model that has a task."""
    return next(model["id"] for model in ask("/v1/models")["data"] if task in model["tasks"])


def expected(texts: list[str], **fields: Any) -> list[list[float]]:
    """Embeddings of texts."""
    return [entry["embedding"] for entry in ask("/v1/embeddings", {"input": texts, **fields})["data"]]


def expected_order(query: str, texts: list[str]) -> list[int]:
    """Indices of texts by their relevance."""
    return [
        result["index"] for result in ask("/rerank", {"query": query, "documents": texts, "model": RERANKER})["results"]
    ]


def close(actual: Any, expected: Any) -> bool:
    """Whether two lists of embeddings are equal to 1e-3, as some clients get them in fewer bits or batches."""
    pairs = [(a, b) for row, other in zip(actual, expected, strict=True) for a, b in zip(row, other, strict=True)]
    return len(pairs) > 0 and max(abs(a - b) for a, b in pairs) < 1e-3


EMBEDDER = model_with("embed")
RERANKER = next((model["id"] for model in ask("/v1/models")["data"] if model["tasks"][0] != "embed"), EMBEDDER)

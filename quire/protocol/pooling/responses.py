"""Response bodies. Arrays are written without these models, which document them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from quire.protocol.common import ERRORS, Usage


class EmbeddingResponseData(BaseModel):
    """The embedding of one input: numbers, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """The response body of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingResponseData]
    usage: Usage


class PoolingResponseData(BaseModel):
    """The result of one input: a vector, one vector for each token, or base64."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    """The response body of /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingResponseData]
    usage: Usage


class ClassificationData(BaseModel):
    """The class of one input."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """The response body of /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: Usage


class ScoreResponseData(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float | None


class ScoreResponse(BaseModel):
    """The response body of /score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreResponseData]
    usage: Usage


class RerankDocument(BaseModel):
    """The texts of a document of the request, null if it has none, and the paths of its parts with media, if any."""

    text: str | None
    media: list[str] | None = None


class RerankResult(BaseModel):
    """A document and its score."""

    index: int
    relevance_score: float | None
    document: RerankDocument | None = None


class RerankUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """The response body of /rerank: the documents in descending order of their scores."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: RerankUsage
    meta: dict[str, Any]


def openapi_arrays(*models: type[BaseModel] | Any, binary: bool = False) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of an endpoint with one of these bodies. `binary`: or with arrays as bytes."""
    union: Any = models[0]
    for model in models[1:]:
        union |= model
    answer: dict[str, Any] = {"model": union}
    if binary:
        answer["content"] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {200: answer, **ERRORS}

"""What a core without a model answers to pooling requests: sums over the tokens, in the right shapes."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.engine.client.model_info import ModelInfo, Pools
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, PooledArray

SIZE, TOKEN_SIZE = 32, 16
LABELS = ("calm", "glad", "sad")
POOLING = Pools(
    tasks=("embed", "classify", "score", "token_embed", "token_classify"),
    embedding_size=SIZE,
    token_embedding_size=TOKEN_SIZE,
    matryoshka=True,
    labels=LABELS,
    score_method="cross_encoder",
)


def pooling_info(info: ModelInfo, *tasks: str, **changes: object) -> ModelInfo:
    """The facts about a model that has these pooling tasks; default: all."""
    return msgspec.structs.replace(info, kind=msgspec.structs.replace(POOLING, tasks=tasks or POOLING.tasks, **changes))


def pooled(facts: Pools, message: AddRequest) -> PooledArray:
    """The answer to a pooling request."""
    params, tokens = message.params, message.prompt.astype(np.int64)
    assert isinstance(params, PoolingParams)
    match params.task:
        case "embed":
            size = facts.embedding_size
            counts = np.bincount(tokens[params.skip_tokens :] % size, minlength=size).astype(np.float32)
            if facts.sparse:
                return counts[: params.dimensions]
            return _activated((counts - 0.25)[: params.dimensions], params)
        case "token_embed":
            size = facts.token_embedding_size
            return _activated(np.eye(size, dtype=np.float32)[tokens % size] + 0.25, params)
        case "classify":
            return _probabilities(_logits(tokens.sum(keepdims=True), facts)[0], params)
        case "token_classify":
            return _probabilities(_logits(tokens, facts), params)
        case "score":
            return _score(tokens, message.second_text_start, params)
        case "align" | "ctc":
            raise AssertionError("a fake model that pools does not transcribe")


def _score(tokens: np.ndarray, start: int | None, params: PoolingParams) -> PooledArray:
    """How much of the second text is in the first one. Without a boundary: of the second half."""
    start = len(tokens) // 2 if start is None else start
    first, second = set(tokens[:start].tolist()), tokens[start:].tolist()
    logit = np.float32(4 * sum(token in first for token in second) / max(1, len(second)) - 2)
    value = logit if params.use_activation is False else 1 / (1 + np.exp(-logit))
    return np.array([value], np.float32)


def _logits(tokens: np.ndarray, facts: Pools) -> PooledArray:
    return (tokens[:, None] * np.arange(1, len(facts.labels) + 1) % 7).astype(np.float32)


def _probabilities(logits: PooledArray, params: PoolingParams) -> PooledArray:
    if params.use_activation is False:
        return logits
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float32)


def _activated(values: PooledArray, params: PoolingParams) -> PooledArray:
    if params.use_activation is False:
        return values
    return np.asarray(values / np.linalg.norm(values, axis=-1, keepdims=True), np.float32)

"""Scores of queries and documents: by their embeddings, by those of their tokens, or by a cross-encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.api.http.tenant import current_tenant
from quire.api.pooling.prepare import text_part
from quire.api.pooling.run import Head, Part, Results, pool
from quire.engine.wire.protocol import PooledArray, PoolingParams
from quire.multimodal.batches import Fit, Names, PairsJob

_UNSHORTENED = 0
_AT_ONCE = 256  # pairs of vectors that are compared at a time: 2 ms
_SHORT = 1 << 20  # multiplications of a comparison on the event loop: 0.1 ms
_SIMILARITIES = 1 << 20  # that are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What is compared.

    Attributes:
        queries: one, which is compared with all documents, or as many as there are documents.
        query_field, document_field: names of the request's fields, for errors.
        several: whether each of them is a list in the request.
        use_activation: of a cross-encoder.
        instruction, variables: for a model whose prompt has a place for them.
        query_tokens, document_tokens: longer texts are cut to so many; 0: they are not.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    fit: Fit
    query_field: str = "query"
    document_field: str = "documents"
    several: tuple[bool, bool] = (False, True)
    use_activation: bool | None = None
    instruction: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    query_tokens: int = _UNSHORTENED
    document_tokens: int = _UNSHORTENED

    @property
    def names(self) -> tuple[Names, Names]:
        """Names of queries and documents."""
        return Names(self.query_field, self.several[0]), Names(self.document_field, self.several[1])

    @property
    def document_fit(self) -> Fit:
        """A request that bounds its documents wants long ones to be cut, also to the context length."""
        return replace(self.fit, truncate=True) if self.document_tokens else self.fit


def by_embeddings(head: Head) -> bool:
    """Whether the model compares embeddings, to which activation and variables do not apply."""
    pooling = head.model.info.pooling
    return pooling is not None and pooling.score_method in ("cosine", "dot", "max_sim")


async def scores(head: Head, scoring: Scoring) -> Results:
    """The scores of all pairs, each an array of one number.

    Raises:
        InvalidRequest: the engine does not accept an input.
        PromptError: an input cannot be tokenized, or the model's prompt takes no instruction.
        EngineError: the engine failed.
    """
    pooling = head.model.info.pooling
    match None if pooling is None else pooling.score_method:
        case "cosine":
            return await _by_vectors(head, scoring, _cosine)
        case "dot":
            return await _by_vectors(head, scoring, _dot)
        case "max_sim":
            return await _by_tokens(head, scoring)
        case _:
            return await _by_cross_encoder(head, scoring)


def order_of(results: Results) -> Sequence[int]:
    """Indices in descending order of scores; NaN comes last."""
    values = np.array([value[0] for value in results.arrays], np.float32)
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order


async def _by_cross_encoder(head: Head, scoring: Scoring) -> Results:
    queries = scoring.queries
    repeated = queries if len(queries) == len(scoring.documents) else list(queries) * len(scoring.documents)
    names = scoring.names[1]
    job = PairsJob(
        texts=list(zip(repeated, scoring.documents, strict=True)),
        fit=scoring.document_fit,
        names=names,
        instruction=scoring.instruction,
        variables=scoring.variables,
        query_tokens=scoring.query_tokens,
        document_tokens=scoring.document_tokens,
    )
    return await pool(head, Part(job, PoolingParams(task="score", use_activation=scoring.use_activation), names))


async def _by_vectors(head: Head, scoring: Scoring, compare: Callable[[PooledArray, PooledArray], float]) -> Results:
    params = PoolingParams(task="embed")
    pooling = head.model.info.pooling
    if pooling is not None and pooling.sparse:
        return await _in_two_steps(head, scoring, params, lambda query, document: _scalar(compare(query, document)))
    found = await pool(head, _query_part(head, scoring, params), _document_part(head, scoring, params))
    queries, documents = found.arrays[: len(scoring.queries)], found.arrays[len(scoring.queries) :]
    repeated = queries if len(queries) == len(documents) else queries * len(documents)
    values: list[PooledArray] = []
    for index, (query, document) in enumerate(zip(repeated, documents, strict=True)):
        values.append(_scalar(compare(query, document)))
        if index % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return replace(found, arrays=values)


async def _in_two_steps(
    head: Head,
    scoring: Scoring,
    params: PoolingParams,
    compare: Callable[[PooledArray, PooledArray], PooledArray | Awaitable[PooledArray]],
) -> Results:
    """Compare each document as soon as it is computed, and keep only its score: all of them may be gigabytes."""
    first = await pool(head, _query_part(head, scoring, params))
    one = len(first.arrays) == 1

    def keep(index: int, document: PooledArray) -> PooledArray | Awaitable[PooledArray]:
        return compare(first.arrays[0 if one else index], document)

    second = await pool(head, _document_part(head, scoring, params), keep=keep)
    return Results(second.arrays, first.tokens + second.tokens, first.cached_tokens + second.cached_tokens)


async def _by_tokens(head: Head, scoring: Scoring) -> Results:
    tenant = current_tenant()

    def compare(query: PooledArray, document: PooledArray) -> PooledArray | Awaitable[PooledArray]:
        work = partial(_max_sim, query, document)
        return work() if query.size * len(document) <= _SHORT else head.model.scorer.run(work, tenant=tenant)

    return await _in_two_steps(head, scoring, PoolingParams(task="token_embed"), compare)


def _max_sim(query: PooledArray, document: PooledArray) -> PooledArray:
    """For each query token the document token that is most similar, summed over the query."""
    rows = max(1, _SIMILARITIES // max(1, len(document)))
    parts = (query[start : start + rows] @ document.T for start in range(0, len(query), rows))
    return _scalar(sum(float(part.max(axis=1).sum()) for part in parts))


def _query_part(head: Head, scoring: Scoring, params: PoolingParams) -> Part:
    sentences = head.model.renderer.sentences
    prefix = sentences.prompt_for("query")
    if scoring.instruction is not None:
        prefix = sentences.with_instruction(prefix, scoring.instruction)
    fit = _shortened(head, scoring.fit, scoring.query_tokens)
    return text_part(head.model, _listed(scoring.queries, scoring.several[0]), params, fit, scoring.query_field,
                     prefix=prefix)  # fmt: skip


def _document_part(head: Head, scoring: Scoring, params: PoolingParams) -> Part:
    prefix = head.model.renderer.sentences.prompt_for("document")
    fit = _shortened(head, scoring.fit, scoring.document_tokens)
    return text_part(head.model, _listed(scoring.documents, scoring.several[1]), params, fit, scoring.document_field,
                     prefix=prefix)  # fmt: skip


def _listed(texts: Sequence[str], several: bool) -> str | Sequence[str]:
    """Texts as they were in the request, so that errors name them as there."""
    return texts if several else texts[0]


def _shortened(head: Head, fit: Fit, tokens: int) -> Fit:
    if not tokens:
        return fit
    special = head.model.renderer.tokenizer.backend.num_special_tokens_to_add(False)
    return replace(fit, tokens=min(fit.tokens, tokens + special), truncate=True)


def _cosine(query: PooledArray, document: PooledArray) -> float:
    length = float(np.linalg.norm(query)) * float(np.linalg.norm(document))
    return _dot(query, document) / length if length else 0.0


def _dot(query: PooledArray, document: PooledArray) -> float:
    return float(np.dot(query, document))


def _scalar(value: float) -> NDArray[np.float32]:
    return np.array([value], np.float32)

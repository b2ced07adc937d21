"""Scores of queries and documents: by their embeddings, by those of their tokens, or by a cross-encoder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.api.pooling.conversations import Input, InputOptions, InputReader, Side, has_media
from quire.api.pooling.prepare import text_group
from quire.api.pooling.run import InputGroup, PoolingContext, PoolingResults, run_pooling
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray
from quire.multimodal.errors import PromptError
from quire.protocol.errors import InvalidRequest
from quire.rendering.pooling_prompts import InputNames, PairsJob, Truncation
from quire.workers.tenant import current_tenant, take_turn

_UNSHORTENED = 0
_AT_ONCE = 256  # pairs of vectors that are compared at a time: 2 ms
_SHORT = 1 << 20  # multiplications of a comparison on the event loop: 0.1 ms
_SIMILARITIES = 1 << 20  # that are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The inputs to compare.

    Attributes:
        queries: one query, which is compared with all documents, or as many queries as documents.
        query_field, document_field: names of the request's fields, for errors.
        several: whether each of them is a list in the request.
        use_activation: whether a cross-encoder's scores go through its activation; None: as the model's files say.
        instruction, variables: values for the model's prompt template, if it has one.
        query_tokens, document_tokens: limits in tokens, to which longer texts are truncated; 0: no limit.
        reader: reads inputs with media; None: there are none.
    """

    queries: Sequence[Input]
    documents: Sequence[Input]
    truncation: Truncation
    query_field: str = "query"
    document_field: str = "documents"
    several: tuple[bool, bool] = (False, True)
    use_activation: bool | None = None
    instruction: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    query_tokens: int = _UNSHORTENED
    document_tokens: int = _UNSHORTENED
    reader: InputReader | None = None

    @property
    def unused_fields(self) -> Sequence[str]:
        """Paths of fields of media that have no effect; complete once the inputs were read."""
        return () if self.reader is None else tuple(self.reader.unused_fields)

    @property
    def truncating_field(self) -> str | None:
        """The field of the request that truncates inputs; None if they are not truncated."""
        fields = {
            "truncate_prompt_tokens": self.truncation.truncate,
            "max_tokens_per_query": self.query_tokens > 0,
            "max_tokens_per_doc": self.document_tokens > 0,
        }
        return next((name for name, is_set in fields.items() if is_set), None)

    @property
    def names(self) -> tuple[InputNames, InputNames]:
        """Names of queries and documents."""
        return InputNames(self.query_field, self.several[0]), InputNames(self.document_field, self.several[1])

    @property
    def document_truncation(self) -> Truncation:
        """Truncation of documents. With a limit of documents, it also applies to the context length."""
        return replace(self.truncation, truncate=True) if self.document_tokens else self.truncation


def by_embeddings(context: PoolingContext) -> bool:
    """Return whether the model compares embeddings, to which activation and variables do not apply."""
    return context.model.pools.score_method in ("cosine", "dot", "max_sim")


async def scores(context: PoolingContext, scoring: Scoring) -> PoolingResults:
    """The scores of all pairs, each an array of one number.

    Raises:
        InvalidRequest: the engine does not accept an input.
        PromptError: an input cannot be tokenized, or the model's prompt takes no instruction.
        EngineError: the engine failed.
    """
    if scoring.reader is not None:
        for inputs, names in zip((scoring.queries, scoring.documents), scoring.names, strict=True):
            scoring.reader.check(inputs, names)
    match context.model.pools.score_method:
        case "cosine":
            return await _by_vectors(context, scoring, _cosine)
        case "dot":
            return await _by_vectors(context, scoring, _dot)
        case "max_sim":
            return await _by_tokens(context, scoring)
        case _:
            return await _by_cross_encoder(context, scoring)


def order_of(results: PoolingResults) -> Sequence[int]:
    """Indices in descending order of scores; NaN comes last."""
    values = np.array([value[0] for value in results.arrays], np.float32)
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order


async def _by_cross_encoder(context: PoolingContext, scoring: Scoring) -> PoolingResults:
    params = PoolingParams(task="score", use_activation=scoring.use_activation)
    if scoring.reader is not None and has_media([*scoring.queries, *scoring.documents]):
        options = _input_options(scoring, scoring.instruction)
        source = partial(scoring.reader.pairs, scoring.queries, scoring.documents, scoring.names, options)
        return await run_pooling(context, InputGroup(source, params, scoring.names[1]))
    query_names, names = scoring.names
    queries, documents = _texts(scoring.queries, query_names), _texts(scoring.documents, names)
    repeated = queries if len(queries) == len(documents) else queries * len(documents)
    if len(queries) != len(documents):
        query_names = InputNames(query_names.at(0), several=False)
    job = PairsJob(
        texts=list(zip(repeated, documents, strict=True)),
        truncation=scoring.document_truncation,
        names=names,
        queries=query_names,
        instruction=scoring.instruction,
        variables=scoring.variables,
        query_tokens=scoring.query_tokens,
        document_tokens=scoring.document_tokens,
    )
    return await run_pooling(context, InputGroup(job, params, names))


async def _by_vectors(
    context: PoolingContext, scoring: Scoring, compare: Callable[[PooledArray, PooledArray], float]
) -> PoolingResults:
    params = PoolingParams(task="embed")
    if context.model.pools.sparse:
        return await _in_two_steps(context, scoring, params, lambda query, document: _scalar(compare(query, document)))
    vectors = await run_pooling(
        context, _query_group(context, scoring, params), _document_group(context, scoring, params)
    )
    queries = vectors.arrays[: len(scoring.queries)]
    documents = vectors.arrays[len(scoring.queries) :]
    repeated = queries if len(queries) == len(documents) else queries * len(documents)
    values: list[PooledArray] = []
    for index, (query, document) in enumerate(zip(repeated, documents, strict=True)):
        if index % _AT_ONCE == 0:
            await take_turn()
        values.append(_scalar(compare(query, document)))
    return replace(vectors, arrays=values)


async def _in_two_steps(
    context: PoolingContext,
    scoring: Scoring,
    params: PoolingParams,
    compare: Callable[[PooledArray, PooledArray], PooledArray | Awaitable[PooledArray]],
) -> PoolingResults:
    """Compare each document as soon as it is computed, and keep only its score: all of them may be gigabytes."""
    first = await run_pooling(context, _query_group(context, scoring, params))
    single_query = len(first.arrays) == 1

    def score(index: int, document: PooledArray) -> PooledArray | Awaitable[PooledArray]:
        return compare(first.arrays[0 if single_query else index], document)

    second = await run_pooling(context, _document_group(context, scoring, params), on_result=score)
    return PoolingResults(second.arrays, first.tokens + second.tokens, first.cached_tokens + second.cached_tokens)


async def _by_tokens(context: PoolingContext, scoring: Scoring) -> PoolingResults:
    tenant = current_tenant()

    def compare(query: PooledArray, document: PooledArray) -> PooledArray | Awaitable[PooledArray]:
        work = partial(_max_sim, query, document)
        return work() if query.size * len(document) <= _SHORT else context.model.scorer.run(work, tenant=tenant)

    return await _in_two_steps(context, scoring, PoolingParams(task="token_embed"), compare)


def _max_sim(query: PooledArray, document: PooledArray) -> PooledArray:
    """Sum, over the query's tokens, the similarity of the most similar document token."""
    rows = max(1, _SIMILARITIES // max(1, len(document)))
    similarities = (query[start : start + rows] @ document.T for start in range(0, len(query), rows))
    return _scalar(sum(float(part.max(axis=1).sum()) for part in similarities))


def _query_group(context: PoolingContext, scoring: Scoring, params: PoolingParams) -> InputGroup:
    sentences = context.model.renderer.sentence_transformers
    prefix = sentences.prompt_for("query")
    if _is_rendered(scoring, scoring.queries):
        return _rendered_group(scoring, params, "query", prefix)
    if scoring.instruction is not None:
        prefix = sentences.with_instruction(prefix, scoring.instruction)
    truncation = _shortened(context, scoring.truncation, scoring.query_tokens)
    queries = _listed(_texts(scoring.queries, scoring.names[0]), scoring.several[0])
    return text_group(context.model, queries, params, truncation, scoring.query_field, prefix=prefix)


def _document_group(context: PoolingContext, scoring: Scoring, params: PoolingParams) -> InputGroup:
    prefix = context.model.renderer.sentence_transformers.prompt_for("document")
    if _is_rendered(scoring, scoring.documents):
        return _rendered_group(scoring, params, "document", prefix)
    truncation = _shortened(context, scoring.truncation, scoring.document_tokens)
    documents = _listed(_texts(scoring.documents, scoring.names[1]), scoring.several[1])
    return text_group(context.model, documents, params, truncation, scoring.document_field, prefix=prefix)


def _is_rendered(scoring: Scoring, inputs: Sequence[Input]) -> bool:
    reader = scoring.reader
    return reader is not None and (reader.renders or (reader.alone and has_media(inputs)))


def _rendered_group(scoring: Scoring, params: PoolingParams, side: Side, prompt: str) -> InputGroup:
    """Queries or documents as messages. `prompt`: the model's prompt for them, which is the system message."""
    reader = scoring.reader
    assert reader is not None
    index = 0 if side == "query" else 1
    inputs, names = (scoring.queries, scoring.documents)[index], scoring.names[index]
    instruction = scoring.instruction if side == "query" else None
    options = _input_options(scoring, instruction or prompt or None)
    return InputGroup(partial(reader.each, inputs, side, names, options), params, names)


def _input_options(scoring: Scoring, instruction: str | None) -> InputOptions:
    """Options of inputs that are rendered.

    Raises:
        InvalidRequest: they would be truncated, which would cut off what the template puts behind them.
    """
    if (name := scoring.truncating_field) is not None:
        raise InvalidRequest(
            f"`{name}` is not supported for models that read pictures: the chat template renders each input.", name
        )
    return InputOptions(truncation=scoring.truncation, instruction=instruction, variables=scoring.variables)


def _texts(inputs: Sequence[Input], names: InputNames) -> list[str]:
    """The inputs of a model whose inputs are not rendered.

    Raises:
        PromptError: one is not a text.
    """
    texts = []
    for index, value in enumerate(inputs):
        if not isinstance(value, str):
            raise PromptError(
                "The model has no chat template, which inputs with pictures or files need; start the server with "
                "--chat-template.",
                names.at(index),
            )
        texts.append(value)
    return texts


def _listed(texts: Sequence[str], several: bool) -> str | Sequence[str]:
    """Texts as they were in the request, so that errors name them as there."""
    return texts if several else texts[0]


def _shortened(context: PoolingContext, truncation: Truncation, tokens: int) -> Truncation:
    if not tokens:
        return truncation
    special = context.model.renderer.tokenizer.backend.num_special_tokens_to_add(False)
    return replace(truncation, tokens=min(truncation.tokens, tokens + special), truncate=True)


def _cosine(query: PooledArray, document: PooledArray) -> float:
    length = float(np.linalg.norm(query)) * float(np.linalg.norm(document))
    return _dot(query, document) / length if length else 0.0


def _dot(query: PooledArray, document: PooledArray) -> float:
    return float(np.dot(query, document))


def _scalar(value: float) -> NDArray[np.float32]:
    return np.array([value], np.float32)

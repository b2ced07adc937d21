"""The endpoints of Text Embeddings Inference (TEI), and /rerank in its format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire import __version__
from quire.api.http.routing import CheckedRoute
from quire.api.http.streamed_body import response_of
from quire.api.pooling.arrays import json_of
from quire.api.pooling.embeddings import label_of
from quire.api.pooling.prepare import (
    count_inputs,
    embed_params,
    longest_input,
    prefix_of,
    text_group,
    truncation_of,
)
from quire.api.pooling.responses import encode_values, list_of, respond
from quire.api.pooling.run import InputGroup, PoolingContext, PoolingResults, admit_pooling, check_count, run_pooling
from quire.api.pooling.scoring import Scoring, order_of, scores
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.responses import openapi_arrays
from quire.protocol.pooling.tei import (
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiEmbedSparseRequest,
    TeiFields,
    TeiInfo,
    TeiLabels,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSparseVectors,
    TeiTextFields,
    TeiTokenVectors,
    TeiVectors,
)
from quire.rendering.pooling_prompts import InputNames, PairsJob, Truncation
from quire.serving.models import PoolingModel, ServerState

_THREADS = 2  # of the renderer


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of text-embeddings-inference's API."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/embed", responses=openapi_arrays(TeiVectors), response_model=None)
    async def embed(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts."""
        return await answer_tei_embed(body, request, state)

    @routes.post("/embed_all", responses=openapi_arrays(TeiTokenVectors), response_model=None)
    async def embed_all(body: TeiEmbedAllRequest, request: Request) -> Response:
        """Embed each token of texts."""
        model = state.pooling_model(body.model, "token_embed")
        return await _answer_vectors(body, request, state, model, PoolingParams(task="token_embed"))

    @routes.post("/embed_sparse", responses=openapi_arrays(TeiSparseVectors), response_model=None)
    async def embed_sparse(body: TeiEmbedSparseRequest, request: Request) -> Response:
        """Embed texts sparsely: by the values that are not 0."""
        model = state.pooling_model(body.model, "embed")
        if not model.pools.sparse:
            raise InvalidRequest(f"The embeddings of the model `{model.names[0]}` are not sparse; use /embed.", "model")
        return await _answer_vectors(body, request, state, model, PoolingParams(task="embed"), sparse=True)

    @routes.post("/predict", responses=openapi_arrays(TeiLabels), response_model=None)
    async def predict(body: TeiPredictRequest, request: Request) -> Response:
        """Classify texts or pairs of texts."""
        return await answer_tei_predict(body, request, state)

    @routes.get("/info", responses=openapi_arrays(TeiInfo))
    async def info(model: str | None = None) -> TeiInfo:
        """The model and its limits; default: the first model that pools."""
        return _info(model, state)

    return routes


async def answer_tei_embed(body: TeiEmbedRequest, request: Request, state: ServerState) -> Response:
    """The embeddings of the inputs, without anything around them.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: an input cannot be tokenized.
        EngineError: it cannot be answered.
    """
    model = state.pooling_model(body.model, "embed")
    params = embed_params(model, "embed", body.dimensions, body.normalize is not False)
    return await _answer_vectors(body, request, state, model, params)


async def answer_tei_rerank(body: TeiRerankRequest, request: Request, state: ServerState) -> Response:
    """The texts in descending order of their scores; see `answer_tei_embed`."""
    model = state.pooling_model(body.model, "score")
    check_count(len(body.texts), state, "texts")
    context = admit_pooling(request, state, model, "rerank", body)
    scoring = Scoring(
        queries=[body.query],
        documents=body.texts,
        truncation=_truncation(model, body),
        document_field="texts",
        use_activation=not body.raw_scores,
    )

    async def work() -> Response:
        results = await scores(context, scoring)
        return response_of(list_of(encode_values(rank(results, index) for index in order_of(results))))

    def rank(results: PoolingResults, index: int) -> dict[str, Any]:
        ranked: dict[str, Any] = {"index": index, "score": float(results.arrays[index][0])}
        return {**ranked, "text": body.texts[index]} if body.return_text else ranked

    return await respond(request, context, work())


async def answer_tei_predict(body: TeiPredictRequest, request: Request, state: ServerState) -> Response:
    """The labels of each input; see `answer_tei_embed`."""
    model = state.pooling_model(body.model, "classify")
    several = isinstance(body.inputs, list)
    sequences: Sequence[tuple[str, ...]] = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    check_count(len(sequences), state, "inputs")
    context = admit_pooling(request, state, model, "predict", body)
    params = PoolingParams(task="classify", use_activation=not body.raw_scores)
    truncation = _truncation(model, body)
    names = InputNames("inputs", several)

    async def work() -> Response:
        results = await run_pooling(context, *_sequence_groups(model, sequences, params, truncation, names))
        labels = encode_values(_labels(context, array) for array in results.arrays)
        return response_of(list_of(labels) if several else next(labels))

    return await respond(request, context, work())


def _sequence_groups(
    model: PoolingModel,
    sequences: Sequence[tuple[str, ...]],
    params: PoolingParams,
    truncation: Truncation,
    names: InputNames,
) -> list[InputGroup]:
    if all(len(sequence) == 1 for sequence in sequences):
        texts = [sequence[0] for sequence in sequences]
        return [text_group(model, texts if names.several else texts[0], params, truncation, names.field)]
    if any(len(sequence) == 1 for sequence in sequences):
        raise InvalidRequest("`inputs` must be all texts or all pairs of texts.", "inputs")
    pairs = [(sequence[0], sequence[1]) for sequence in sequences]
    return [InputGroup(PairsJob(texts=pairs, truncation=truncation, names=names), params, names)]


async def _answer_vectors(
    body: TeiTextFields,
    request: Request,
    state: ServerState,
    model: PoolingModel,
    params: PoolingParams,
    *,
    sparse: bool = False,
) -> Response:
    check_count(count_inputs(body.inputs), state, "inputs")
    context = admit_pooling(request, state, model, "embed", body)

    async def work() -> Response:
        prefix = prefix_of(model, body.prompt_name, None, None)
        truncation = _truncation(model, body, embeds=params.task == "embed")
        results = await run_pooling(
            context, text_group(model, body.inputs, params, truncation, "inputs", prefix=prefix)
        )
        items = (_sparse(array) if sparse else json_of(array, "float32") for array in results.arrays)
        return response_of(list_of(items))

    return await respond(request, context, work())


def _sparse(values: PooledArray) -> Iterator[bytes]:
    indices = np.flatnonzero(values)
    pairs = zip(indices.tolist(), values[indices].tolist(), strict=True)
    return list_of(encode_values({"index": index, "value": value} for index, value in pairs))


def _labels(context: PoolingContext, values: PooledArray) -> list[dict[str, Any]]:
    return [
        {"score": float(values[index]), "label": label_of(context.model, index) or f"LABEL_{index}"}
        for index in np.argsort(-values, kind="stable").tolist()
    ]


def _truncation(model: PoolingModel, body: TeiFields, *, embeds: bool = False) -> Truncation:
    return truncation_of(model, -1 if body.truncate else None, body.truncation_direction, embeds=embeds)


def _info(name: str | None, state: ServerState) -> TeiInfo:
    model = state.pooling_models(name)[0]
    facts = model.pools
    labels = {str(index): label for index, label in enumerate(facts.labels)}
    classes = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
    if "embed" in model.tasks or "token_embed" in model.tasks:
        kind: dict[str, Any] = {"embedding": {"pooling": "splade" if facts.sparse else "model"}}
    else:
        kind = {"reranker" if facts.score_method == "cross_encoder" else "classifier": classes}
    return TeiInfo(
        model_id=model.names[0],
        model_sha=None,
        model_dtype=model.info.dtype,
        model_type=kind,
        max_concurrent_requests=model.client.capacity,
        max_input_length=longest_input(model, embeds="embed" in model.tasks),
        max_batch_tokens=None,
        max_batch_requests=None,
        max_client_batch_size=state.limits.max_inputs,
        auto_truncate=False,
        tokenization_workers=_THREADS,
        version=__version__,
        sha=None,
        docker_label=None,
    )

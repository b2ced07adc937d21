"""POST /v1/embeddings, /pooling and /classify: OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.http.routing import CheckedRoute
from quire.api.http.streamed_body import response_of
from quire.api.pooling.prepare import check_inputs, count_inputs, embed_params, input_group
from quire.api.pooling.responses import (
    arrays_response,
    check_encoding,
    context_fields,
    encode_values,
    list_body,
    respond,
)
from quire.api.pooling.run import PoolingContext, admit_pooling, run_pooling
from quire.engine.client.pooling_params import PoolingParams, PoolingTask
from quire.engine.client.protocol import PooledArray
from quire.protocol.errors import InvalidRequest, shorten
from quire.protocol.pooling.requests import (
    ClassifyChatRequest,
    ClassifyRequest,
    ClassifyTextRequest,
    EmbeddingChatRequest,
    EmbeddingRequest,
    EmbeddingTextRequest,
    PoolingChatRequest,
    PoolingRequest,
    PoolingTextRequest,
    TextInput,
)
from quire.protocol.pooling.responses import ClassificationResponse, EmbeddingResponse, PoolingResponse, openapi_arrays
from quire.serving.models import PoolingModel, ServerState

_EMBEDS = ("embed", "token_embed")


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of embeddings, pooling and classification."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/embeddings", responses=openapi_arrays(EmbeddingResponse, binary=True), response_model=None)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts or a conversation."""
        return await answer_embeddings(body, request, state)

    @routes.post("/pooling", responses=openapi_arrays(PoolingResponse, binary=True), response_model=None)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Embed or classify texts or their tokens: any task of the model."""
        return await answer_pooling(body, request, state)

    @routes.post("/classify", responses=openapi_arrays(ClassificationResponse), response_model=None)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Classify texts or a conversation."""
        return await answer_classify(body, request, state)

    return routes


async def answer_embeddings(
    body: EmbeddingTextRequest | EmbeddingChatRequest, request: Request, state: ServerState
) -> Response:
    """The embeddings of the inputs.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: an input cannot be tokenized.
        EngineError: it cannot be answered.
    """
    model = state.pooling_model(body.model, "embed")
    params = embed_params(model, "embed", body.dimensions, body.use_activation)
    return await _answer_arrays(body, request, state, model, params, kind="embedding", key="embedding")


async def answer_pooling(
    body: PoolingTextRequest | PoolingChatRequest, request: Request, state: ServerState
) -> Response:
    """The results of any task; see `answer_embeddings`."""
    model, task = _pooling_task(body, state)
    if task not in _EMBEDS:
        for name in ("dimensions", "prompt_name", "input_type", "instruction"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"`{name}` applies to embeddings, not to the task {task}.", name)
    params = embed_params(model, task, body.dimensions, body.use_activation)
    return await _answer_arrays(body, request, state, model, params, kind="pooling", key="data")


async def answer_classify(
    body: ClassifyTextRequest | ClassifyChatRequest, request: Request, state: ServerState
) -> Response:
    """The class probabilities of the inputs; see `answer_embeddings`."""
    model = state.pooling_model(body.model, "classify")
    check_inputs(body, state)
    context = admit_pooling(request, state, model, "classify", body)
    params = PoolingParams(task="classify", use_activation=body.use_activation)

    async def work() -> Response:
        results = await run_pooling(context, await input_group(body, request, state, model, params))
        items = encode_values(_classified(context, i, array) for i, array in enumerate(results.arrays))
        return response_of(list_body(context_fields(context), "data", items, {"usage": results.usage().model_dump()}))

    return await respond(request, context, work())


def label_of(model: PoolingModel, index: int) -> str | None:
    """The name of a class; None if the model has none for it."""
    labels = model.pools.labels
    return labels[index] if index < len(labels) else None


async def _answer_arrays(
    body: EmbeddingTextRequest | EmbeddingChatRequest | PoolingTextRequest | PoolingChatRequest,
    request: Request,
    state: ServerState,
    model: PoolingModel,
    params: PoolingParams,
    *,
    kind: str,
    key: str,
) -> Response:
    check_inputs(body, state)
    check_encoding(body, count_inputs(body.input) if isinstance(body, TextInput) else 1)
    context = admit_pooling(request, state, model, "embd" if kind == "embedding" else "pool", body)

    async def work() -> Response:
        results = await run_pooling(context, await input_group(body, request, state, model, params))
        return arrays_response(context, results, body, kind=kind, key=key)

    return await respond(request, context, work())


def _pooling_task(
    body: PoolingTextRequest | PoolingChatRequest, state: ServerState
) -> tuple[PoolingModel, PoolingTask]:
    models = state.pooling_models(body.model)
    for model in models:
        for task in model.pools.tasks:
            if body.task in (None, task):
                return model, task
    listed = ", ".join(task for model in models for task in model.pools.tasks)
    raise InvalidRequest(f"Unsupported task: {shorten(str(body.task))!r}. Supported tasks: {listed}.", "task")


def _classified(context: PoolingContext, index: int, scores: PooledArray) -> dict[str, Any]:
    best = int(np.argmax(scores)) if len(scores) else 0
    return {
        "index": index,
        "label": label_of(context.model, best),
        "probs": scores.tolist(),
        "num_classes": len(scores),
    }

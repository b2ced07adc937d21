"""POST /invocations, which Amazon SageMaker calls, and POST /, which TEI's clients call: any request, by its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Union

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Tag
from starlette.responses import Response

from quire.api.chat.routes import answer_chat
from quire.api.completions.routes import answer_completion
from quire.api.http.routing import CheckedRoute
from quire.api.pooling.embeddings import answer_classify, answer_embeddings, answer_pooling
from quire.api.pooling.rerank import answer_rerank, answer_score
from quire.api.pooling.tei import answer_tei_embed, answer_tei_predict, answer_tei_rerank
from quire.protocol.chat import ChatCompletion, ChatRequest
from quire.protocol.common import RequestBody, openapi_stream
from quire.protocol.completions import Completion, CompletionRequest
from quire.protocol.errors import InvalidRequest, NotFound
from quire.protocol.pooling.requests import (
    SCORE_FIELDS,
    ClassifyChatRequest,
    ClassifyTextRequest,
    EmbeddingChatRequest,
    EmbeddingTextRequest,
    PoolingChatRequest,
    PoolingTextRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.protocol.pooling.responses import (
    ClassificationResponse,
    EmbeddingResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from quire.protocol.pooling.tei import (
    TeiEmbedRequest,
    TeiLabels,
    TeiPredictRequest,
    TeiRanks,
    TeiRerankRequest,
    TeiVectors,
)
from quire.serving.models import ServedModel, ServerState

_INPUT = ("embed", "classify", "token_embed", "token_classify")  # tasks of `input` and `messages`, in this order
_TEI, _SESSION = "an embedding of TEI", "a session of SageMaker"
_Answer = Callable[[Any, Request, ServerState], Any]
# Headers by which SageMaker asks for what Quire does not have.
_HEADERS = {
    "X-Amzn-SageMaker-Session-Id": "stateful sessions are",
    "X-Amzn-SageMaker-Adapter-Identifier": "adapters chosen by a header are",
}


class SessionRequest(RequestBody):
    """SageMaker's request to open or close a stateful session."""

    requestType: Any  # noqa: N815 the name is SageMaker's


async def _refuse_session(_: SessionRequest, __: Request, ___: ServerState) -> Response:
    raise InvalidRequest("`requestType` is not supported: stateful sessions are not supported.", "requestType")


# The kind of a request, which is no name of a field, as it is left out of errors.
_KINDS: dict[str, tuple[type[BaseModel], _Answer]] = {
    "a chat": (ChatRequest, answer_chat),
    "a completion": (CompletionRequest, answer_completion),
    "an embedding": (EmbeddingTextRequest, answer_embeddings),
    "an embedding of a chat": (EmbeddingChatRequest, answer_embeddings),
    "a classification": (ClassifyTextRequest, answer_classify),
    "a classification of a chat": (ClassifyChatRequest, answer_classify),
    "pooling": (PoolingTextRequest, answer_pooling),
    "pooling of a chat": (PoolingChatRequest, answer_pooling),
    "a score": (ScoreRequest, answer_score),
    "a rerank": (RerankRequest, answer_rerank),
    "a rerank of TEI": (TeiRerankRequest, answer_tei_rerank),
    "a prediction of TEI": (TeiPredictRequest, answer_tei_predict),
    _TEI: (TeiEmbedRequest, answer_tei_embed),
    _SESSION: (SessionRequest, _refuse_session),
}
_ANSWERS = (
    ChatCompletion
    | Completion
    | EmbeddingResponse
    | ClassificationResponse
    | PoolingResponse
    | ScoreResponse
    | RerankResponse
    | TeiRanks
    | TeiVectors
    | TeiLabels
)


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of /invocations."""
    routes = APIRouter(route_class=CheckedRoute)

    async def invoke(body: Any, request: Request) -> Response:
        """Answer a conversation, continue prompts, or embed, classify, score or rerank texts."""
        _check_headers(request)
        answer = next(answer for kind, answer in _KINDS.values() if type(body) is kind)
        response: Response = await answer(body, request, state)
        return response

    invoke.__annotations__["body"] = _invocation(state)  # the task of `messages` and `input` depends on the model
    for path in ("/invocations", "/"):
        routes.post(path, responses=openapi_stream(_ANSWERS), response_model=None)(invoke)
    return routes


def _check_headers(request: Request) -> None:
    """Refuse headers whose feature is missing.

    Raises:
        InvalidRequest: there is one.
    """
    for name, feature in _HEADERS.items():
        if name in request.headers:
            raise InvalidRequest(f"The header {name} is not supported: {feature} not supported.", name)


def _invocation(state: ServerState) -> Any:
    members = tuple(Annotated[kind, Tag(name)] for name, (kind, _) in _KINDS.items())
    return Annotated[
        Union[members],  # noqa: UP007 of a tuple
        Discriminator(
            lambda body: _kind(body, state),
            custom_error_type="no_handler",
            custom_error_message="Expected an object with `messages`, for a chat, `prompt`, for a completion, `input`, "
            "for embeddings or classification, `query` and `documents`, for a rerank, or `text_1` and `text_2`, "
            "for scores",
        ),
    ]


def _kind(body: Any, state: ServerState) -> str | None:
    if not isinstance(body, dict):
        return type(body).__name__ if isinstance(body, BaseModel) else None
    if "requestType" in body:
        return _SESSION
    if "prompt" in body and "messages" not in body:
        return "a completion"
    if "query" in body:
        return "a rerank of TEI" if "texts" in body and "documents" not in body else "a rerank"
    if any(name in body for name in SCORE_FIELDS):
        return "a score"
    if "inputs" in body:
        model = _model(body.get("model"), state, "embed", "classify")
        return "a prediction of TEI" if "classify" in model.tasks and "embed" not in model.tasks else _TEI
    chat = "messages" in body
    if not chat and "input" not in body:
        return None
    return _kind_of_input(body, _model(body.get("model"), state, *(["generate"] if chat else []), *_INPUT), chat=chat)


def _kind_of_input(body: dict[str, Any], model: ServedModel, *, chat: bool) -> str:
    """Return what is asked for by `input` or `messages`: the first of these that the model can do."""
    if "task" in body:
        kind = "pooling"
    elif chat and "generate" in model.tasks:
        return "a chat"
    else:
        task = next((task for task in _INPUT if task in model.tasks), "embed")
        kind = {"embed": "an embedding", "classify": "a classification"}.get(task, "pooling")
    return f"{kind} of a chat" if chat else kind


def _model(name: Any, state: ServerState, *tasks: str) -> ServedModel:
    """The requested model; without a name, the first model with one of the tasks, in the order of tasks."""
    if isinstance(name, str) and name:
        try:
            return state.model(name)
        except NotFound:  # the endpoint says so
            return state.models[0]
    able = (model for task in tasks for model in state.models if task in model.tasks)
    return next(able, state.models[0])

"""POST /score and /rerank under all of their paths: vLLM's, Jina's, Cohere's, and TEI's, which has other fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.chat.prepare import settings_of
from quire.api.http.routing import CheckedRoute
from quire.api.http.streamed_body import response_of
from quire.api.pooling.conversations import InputReader
from quire.api.pooling.prepare import truncation_of, with_padding
from quire.api.pooling.responses import context_fields, encode_values, list_body, respond
from quire.api.pooling.run import PoolingContext, PoolingResults, admit_pooling, check_count
from quire.api.pooling.scoring import Scoring, by_embeddings, order_of, scores
from quire.api.pooling.tei import answer_tei_rerank
from quire.protocol import fields
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.inputs import Content
from quire.protocol.pooling.requests import SCORE_FIELDS, RerankRequest, ScoreRequest, ScoringFields
from quire.protocol.pooling.responses import RerankResponse, ScoreResponse, openapi_arrays
from quire.protocol.pooling.tei import AnyRerankRequest, TeiRanks, TeiRerankRequest
from quire.serving.models import ServerState


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of scores and rerank."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/score", responses=openapi_arrays(ScoreResponse), response_model=None)
    @routes.post("/score", responses=openapi_arrays(ScoreResponse), response_model=None)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Compare texts or pictures with others."""
        return await answer_score(body, request, state)

    @routes.post("/v2/rerank", responses=openapi_arrays(RerankResponse, TeiRanks), response_model=None)
    @routes.post("/v1/rerank", responses=openapi_arrays(RerankResponse, TeiRanks), response_model=None)
    @routes.post("/rerank", responses=openapi_arrays(RerankResponse, TeiRanks), response_model=None)
    async def rerank(body: AnyRerankRequest, request: Request) -> Response:
        """Order documents by their relevance to a query."""
        if isinstance(body, TeiRerankRequest):
            return await answer_tei_rerank(body, request, state)
        return await answer_rerank(body, request, state)

    return routes


async def answer_score(body: ScoreRequest, request: Request, state: ServerState) -> Response:
    """A score for each pair.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: an input cannot be tokenized.
        EngineError: it cannot be answered.
    """
    model = state.pooling_model(body.model, "score")
    first, second = _pair_of(body)
    sides = (getattr(body, first), getattr(body, second))
    queries, documents = (inputs if isinstance(inputs, list) else [inputs] for inputs in sides)
    check_count(len(queries), state, first)
    check_count(len(documents), state, second)
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"Input lengths must be either 1:1, 1:N or N:N, not {len(queries)}:{len(documents)}.", second
        )
    context = admit_pooling(request, state, model, "score", body)
    scoring = Scoring(
        queries=queries,
        documents=documents,
        query_field=first,
        document_field=second,
        several=(isinstance(sides[0], list), isinstance(sides[1], list)),
        **_options(body, request, context, state, len(documents)),
    )

    async def work() -> Response:
        results = await scores(context, scoring)
        fields.ignore(request, scoring.unused_fields)
        items = encode_values(
            {"index": index, "object": "score", "score": float(value[0])} for index, value in enumerate(results.arrays)
        )
        return response_of(list_body(context_fields(context), "data", items, {"usage": results.usage().model_dump()}))

    return await respond(request, context, work())


async def answer_rerank(body: RerankRequest, request: Request, state: ServerState) -> Response:
    """The documents in descending order of their scores; see `answer_score`."""
    model = state.pooling_model(body.model, "score")
    check_count(len(body.documents), state, "documents")
    context = admit_pooling(request, state, model, "rerank", body)
    options = _options(body, request, context, state, len(body.documents))
    scoring = Scoring(queries=[body.query], documents=body.documents, **options)
    documents = [_shown(document, f"documents[{index}]") for index, document in enumerate(body.documents)]

    async def work() -> Response:
        results = await scores(context, scoring)
        fields.ignore(request, scoring.unused_fields)
        return response_of(_ranked(context, results, body, documents))

    return await respond(request, context, work())


def _ranked(
    context: PoolingContext, results: PoolingResults, body: RerankRequest, documents: Sequence[dict[str, Any]]
) -> Iterator[bytes]:
    def result(index: int) -> dict[str, Any]:
        ranked: dict[str, Any] = {"index": index, "relevance_score": float(results.arrays[index][0])}
        return ranked if body.return_documents is False else {**ranked, "document": documents[index]}

    before = {"id": context.id, "object": "list", "model": context.name}
    after = {
        "usage": {"prompt_tokens": results.tokens, "total_tokens": results.tokens},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": results.tokens},
        },
    }
    return list_body(before, "results", encode_values(map(result, order_of(results)[: body.top_n or None])), after)


def _shown(document: str | Content, where: str) -> dict[str, Any]:
    """What results have of a document: its texts, and the paths of parts with media in their place."""
    if isinstance(document, str):
        return {"text": document}
    return {"text": document.text, "media": document.media_paths(where)}


def _pair_of(body: ScoreRequest) -> tuple[str, str]:
    """Names of the two fields that a request has; it has been checked that there are two."""
    first = next(name for name in SCORE_FIELDS if getattr(body, name) is not None)
    return first, next(name for name in SCORE_FIELDS[first] if getattr(body, name) is not None)


def _options(
    body: ScoringFields, request: Request, context: PoolingContext, state: ServerState, count: int
) -> dict[str, Any]:
    """Arguments of `Scoring` that both endpoints have. Fields without effect on this model are recorded.

    `count`: number of documents.
    """
    reader = InputReader(context.model, state, settings_of(body))
    if by_embeddings(context):
        names = ("use_activation",) if reader.renders else ("use_activation", "chat_template_kwargs")
        fields.ignore(request, [name for name in names if getattr(body, name) not in (None, {})])
    truncation = truncation_of(context.model, body.truncate_prompt_tokens, body.truncation_side)
    return {
        "truncation": with_padding(context.model, truncation, body.padding, count),
        "use_activation": body.use_activation,
        "instruction": body.instruction,
        "variables": body.chat_template_kwargs or {},
        "query_tokens": body.max_tokens_per_query or 0,
        "document_tokens": body.max_tokens_per_doc or 0,
        "reader": reader,
    }

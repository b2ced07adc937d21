"""POST /v2/embed: Cohere's embeddings, in several types at once."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.http.routing import CheckedRoute
from quire.api.http.streamed_body import response_of
from quire.api.pooling.arrays import base64_of, json_of
from quire.api.pooling.prepare import Side, embed_params, longest_input, prefix_of, text_group, truncation_of
from quire.api.pooling.responses import encode_values, list_of, respond
from quire.api.pooling.run import PoolingContext, PoolingResults, admit_pooling, check_count, run_pooling
from quire.engine.client.protocol import PooledArray
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.cohere import CohereEmbedRequest, CohereEmbedResponse, EmbeddingType
from quire.protocol.pooling.responses import openapi_arrays
from quire.rendering.pooling_prompts import Truncation
from quire.serving.models import PoolingModel, ServerState


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of Cohere's embeddings."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v2/embed", responses=openapi_arrays(CohereEmbedResponse), response_model=None)
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        """Embed texts."""
        return await _answer(body, request, state)

    return routes


async def _answer(body: CohereEmbedRequest, request: Request, state: ServerState) -> Response:
    model = state.pooling_model(body.model, "embed")
    field, texts = ("inputs", body.inputs) if body.texts is None else ("texts", body.texts)
    assert texts is not None
    check_count(len(texts), state, field)
    params = embed_params(model, "embed", body.output_dimension, None, "output_dimension")
    context = admit_pooling(request, state, model, "embed", body)
    prefix = prefix_of(model, None, body.input_type, None)

    async def work() -> Response:
        group = text_group(model, texts, params, _truncation(model, body), field, prefix=prefix)
        return response_of(_pieces(context, await run_pooling(context, group), body, texts))

    return await respond(request, context, work())


def _truncation(model: PoolingModel, body: CohereEmbedRequest) -> Truncation:
    longest = longest_input(model, embeds=True)
    if body.max_tokens is not None and body.max_tokens > longest:
        raise InvalidRequest(
            f"`max_tokens` must be at most the context length of {longest} tokens, not {body.max_tokens}.",
            "max_tokens",
        )
    if body.truncate == "NONE" and body.max_tokens is None:
        return truncation_of(model, None, None, embeds=True)
    side: Side = "left" if body.truncate == "START" else "right"
    return truncation_of(model, body.max_tokens or -1, side, embeds=True)


def _pieces(
    context: PoolingContext, results: PoolingResults, body: CohereEmbedRequest, texts: list[str]
) -> Iterator[bytes]:
    yield b'{"id":' + orjson.dumps(context.id)
    separator = b',"embeddings":{'
    for kind in dict.fromkeys(body.embedding_types or ("float",)):
        yield separator + orjson.dumps(kind) + b":"
        yield from list_of(_encoded(array, kind) for array in results.arrays)
        separator = b","
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": results.tokens, "image_tokens": 0}}
    yield b'},"texts":'
    yield from list_of(encode_values(texts))
    yield b"," + orjson.dumps({"meta": meta, "response_type": "embeddings_by_type"})[1:]


def _encoded(array: PooledArray, kind: EmbeddingType) -> Iterator[bytes]:
    match kind:
        case "float":
            return json_of(array, "float32")
        case "base64":
            return base64_of(array, "float32", "little")
        case _:
            return json_of(array, kind)

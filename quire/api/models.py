"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.chat.conversation import unused_template_fields
from quire.api.chat.prepare import render_chat
from quire.api.http.routing import CheckedRoute
from quire.api.http.sse import unless_disconnected
from quire.protocol import fields
from quire.protocol.common import ERRORS
from quire.protocol.errors import InvalidRequest, NotFound
from quire.protocol.models import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.rendering.prompts import Prompt
from quire.rendering.renderer import Renderer
from quire.serving.models import GeneratingModel, PoolingModel, ServedModel, ServerState, SpeechModel
from quire.workers.tenant import current_tenant


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of models, tokenization and versions."""
    routes = APIRouter(route_class=CheckedRoute, responses=ERRORS)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """The names of all served models."""
        return ModelList(data=[_card(model, name) for model in state.models for name in model.names])

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        """One of the names."""
        if not name:
            raise NotFound("The path lacks the name of a model.", "model")
        return _card(state.model(name), name)

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Tokenize a text or a conversation."""
        model = state.model(body.model)
        if body.prompt is not None:
            fields.ignore(request, _unused_with_prompt(body))
            encoding = model.renderer.text(
                body.prompt, add_special_tokens=body.add_special_tokens is not False, tenant=current_tenant()
            )
            prompt = await unless_disconnected(request, encoding)
        else:
            chat = await unless_disconnected(request, render_chat(body, model, state, 0))
            fields.ignore(request, [*unused_template_fields(body, chat.rendered), *chat.unused_fields])
            prompt = chat.prompt
        content = await asyncio.to_thread(_tokenized, prompt, model, names=bool(body.return_token_strs))
        return Response(content, media_type="application/json")

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        """Turn tokens back into text."""
        model = state.model(body.model)
        size = model.info.vocab_size
        if body.tokens.max(initial=0) >= size:
            raise InvalidRequest(f"`tokens` contains an id outside of the vocabulary of {size} tokens.", "tokens")
        return DetokenizeResponse(prompt=await model.renderer.decode(body.tokens, tenant=current_tenant()))

    if state.tokenizer_info:

        @routes.get("/tokenizer_info")
        async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
            """The tokenizer's configuration, its class and the chat template."""
            return _tokenizer_info(state.model(model).renderer)

    return routes


def _tokenizer_info(renderer: Renderer) -> dict[str, Any]:
    config = renderer.tokenizer.config
    kind = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
    return {**config, "tokenizer_class": kind, "chat_template": renderer.default_template}


def _unused_with_prompt(body: TokenizeRequest) -> list[str]:
    """Names of fields that apply to messages only, in a request with a `prompt`."""
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    names = ("tools", "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
    return [name for name in names if getattr(body, name) not in (defaults.get(name), None, [], {})]


def _tokenized(prompt: Prompt, model: ServedModel, *, names: bool) -> bytes:
    """An encoded `TokenizeResponse`. There may be a million tokens."""
    body: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": model.info.max_model_len,
        "tokens": prompt.token_ids,
        "token_strs": None,
    }
    if names:
        tokens = prompt.token_ids.tolist()
        name_of = {token: model.renderer.tokenizer.token_name(token) for token in set(tokens)}
        body["token_strs"] = [name_of[token] for token in tokens]
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _card(model: ServedModel, name: str) -> ModelCard:
    info = model.info
    return ModelCard(
        id=name,
        created=model.created,
        root=model.root,
        max_model_len=info.max_model_len,
        tasks=list(model.tasks),
        input_modalities=_modalities(model),
    )


def _modalities(model: ServedModel) -> list[str]:
    """What the model reads."""
    match model:
        case SpeechModel():
            return ["audio"]
        case GeneratingModel() | PoolingModel():
            pictures = model.pictures
            read = {
                "image": pictures is not None,
                "video": pictures is not None and pictures.info.video is not None,
                "audio": isinstance(model, GeneratingModel) and model.audio is not None,
            }
            return ["text", *(name for name, is_read in read.items() if is_read)]
        case _:
            return ["text"]

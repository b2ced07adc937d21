"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Response

from quire.api.chat.conversation import conversation_of, unread_fields
from quire.api.http import fields
from quire.api.http.body import StrictRoute
from quire.api.http.errors import InvalidRequest, NotFound
from quire.api.protocol.common import ERRORS
from quire.api.protocol.models import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.api.serving.models import ServedModel, Services


def router(services: Services) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """All names under which models answer."""
        return ModelList(data=[_card(model, name) for model in services.models for name in model.names])

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        """One of them."""
        if not name:
            raise NotFound("The model `` does not exist.", "model")
        return _card(services.model(name), name)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, response: Response) -> TokenizeResponse:
        """Tokens of a text or a conversation."""
        model = services.model(body.model)

        def judge(unread: list[str]) -> None:
            response.headers.update(fields.judge(body, strict=services.strict_fields, unread=unread))

        if body.prompt is not None:
            judge(_idle_beside_prompt(body))
            prompt = await model.renderer.text(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            conversation = conversation_of(body, trusted=services.trust_request_chat_template)
            judge(unread_fields(body, conversation, model.renderer))
            prompt = await model.renderer.chat(conversation)
        tokens = prompt.token_ids.tolist()
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=model.info.max_model_len,
            tokens=tokens,
            token_strs=_texts(tokens, model) if body.return_token_strs else None,
        )

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, response: Response) -> DetokenizeResponse:
        """Text of tokens."""
        model = services.model(body.model)
        response.headers.update(fields.judge(body, strict=services.strict_fields))
        size = model.info.vocab_size
        if any(token >= size for token in body.tokens):
            raise InvalidRequest(f"A token id is out of the vocabulary of {size} tokens.", "tokens")
        return DetokenizeResponse(prompt=await model.renderer.decode(body.tokens))

    return routes


def _idle_beside_prompt(body: TokenizeRequest) -> list[str]:
    """Fields that say how messages are rendered, of a request without messages."""
    idle = {"add_generation_prompt": True, "continue_final_message": False}
    names = ("tools", "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
    return [name for name in names if getattr(body, name) not in (idle.get(name), None, [], {})]


def _texts(tokens: list[int], model: ServedModel) -> list[str]:
    texts = {token: model.renderer.tokenizer.token_text(token) for token in set(tokens)}
    return [texts[token] for token in tokens]


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.root, max_model_len=model.info.max_model_len)

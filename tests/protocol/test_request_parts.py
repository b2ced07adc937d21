"""Objects inside of request bodies: none of them drops a field that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from quire.protocol.anthropic import Conversation, MessagesRequest
from quire.protocol.chat import ChatRequest
from quire.protocol.common import RequestBody, RequestPart, StrictModel
from quire.protocol.completions import CompletionRequest
from quire.protocol.generate import TokensRequest
from quire.protocol.models import DetokenizeRequest, TokenizeRequest
from quire.protocol.pooling import cohere, requests, tei
from quire.protocol.responses import ResponsesRequest
from quire.protocol.speech_to_text import SpeechToTextRequest

POOLING = [
    kind
    for module in (requests, tei, cohere)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, RequestBody) and kind is not RequestBody
]
BODIES = [
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, Conversation, TokensRequest, TokenizeRequest),
    *(DetokenizeRequest, SpeechToTextRequest, *POOLING),
]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for argument in get_args(annotation):
        yield from models_in(argument)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_object_drops_unknown_fields(body: type[RequestBody]) -> None:
    for kind in models_in(body):
        assert issubclass(kind, RequestBody | RequestPart | StrictModel), kind
        assert kind.model_config.get("extra") == ("forbid" if issubclass(kind, StrictModel) else "allow"), kind

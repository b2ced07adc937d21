"""A hostile body, and what many of them are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS, GENERATE = "/v1/messages/count_tokens", "/inference/v1/generate"
RENDER_CHAT, RENDER_COMPLETION = "/v1/chat/completions/render", "/v1/completions/render"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

VOCABULARY = 3900  # ordinary tokens of the bundled model
MEGABYTE = 1_000_000
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request that must not disturb others.

    Attributes:
        make: makes the body; a dict is sent as JSON.
        headers: in place of, or besides, the content type of JSON.
        follow: makes the body after this one from its answer; None: the same body again.
        control: an ordinary request, for comparison; it is not judged.
    """

    name: str
    path: str
    make: Callable[[], Json | str | bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    follow: Callable[[bytes], Json] | None = None
    control: bool = False

    def body(self) -> bytes:
        """The bytes to send."""
        return encode(self.make())


def encode(body: Json | str | bytes) -> bytes:
    """The bytes of a body; a text is sent as it is, because not all of them are valid JSON."""
    if isinstance(body, bytes):
        return body
    return (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).encode()


def chat(content: Any = "Say hello.", **fields: Any) -> Json:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 32, **fields}


def completion(prompt: Any = "Once upon a time", **fields: Any) -> Json:
    """A completion."""
    return {"prompt": prompt, "max_tokens": 32, **fields}


def message(content: Any = "Say hello.", **fields: Any) -> Json:
    """A request to Anthropic's API."""
    return chat(content, **fields)


def response(input_items: Any = "Say hello.", **fields: Any) -> Json:
    """A request to the Responses API, which is not stored."""
    return {"input": input_items, "max_output_tokens": 32, "store": False, **fields}


def with_raw(body: Json, **values: str) -> str:
    """The JSON text of a body with more fields, whose values are given as text: Python could not encode them."""
    return json.dumps(body)[:-1] + "".join(f', "{name}": {text}' for name, text in values.items()) + "}"


def nested(depth: int, before: str = "[", inner: str = "", after: str = "]") -> str:
    """Text that is nested to a depth."""
    return before * depth + inner + after * depth


def function(name: str, parameters: Any = None) -> Json:
    """A tool of a chat."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def token_ids(count: int) -> list[int]:
    """Ids of ordinary tokens, which repeat after the size of the vocabulary."""
    return [index % VOCABULARY for index in range(count)]

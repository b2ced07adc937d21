"""Undeclared request fields: nothing is silently ignored.

A field of OpenAI's or vLLM's API that Quire does not support is refused by name, unless its value is the default.
Harmless fields are accepted and have no effect. Unknown fields are accepted and named in a response header, or refused
with --strict-fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.errors import InvalidRequest, shorten

logger = logging.getLogger(__name__)
HEADER = "x-quire-ignored-fields"
_MAX_NAMES = 20  # in the header
_MAX_NAME_LENGTH = 128  # in the header
_MAX_UNDECLARED = 1024  # fields of a request
_IGNORED = "quire.ignored_fields"  # key in the ASGI scope

# Accepted without effect, with any value: metadata, and hints for a provider's caches and billing.
HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_options.include_obfuscation",
        "user",
    }
)

# Not supported. Each name has the values that are accepted because they are the default; null and empty values always
# are.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "access_programs": (),
    "best_of": (1,),
    "context_management": (),
    "conversation": (),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": (),
    "images": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "padding": ("do_not_pad",),
    "previous_input_messages": (),
    "prompt_embeds": (),
    "rank_fields": (["text"],),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "watermarking": (False,),
    "web_search_options": (),
}


def set_fields(model: BaseModel) -> dict[str, Any]:
    """The fields that the client has set, undeclared ones included. Values are not copied."""
    return {name: value for name, value in model if name in model.model_fields_set}


def take_unknown_fields(body: BaseModel) -> list[str]:
    """Names of the undeclared fields of a request that have no effect. Undeclared fields are removed from the body.

    Raises:
        InvalidRequest: a field is not supported, or there are too many undeclared ones.
    """
    undeclared = (body.model_extra or {}) | _stream_options(body)
    (body.model_extra or {}).clear()
    if len(undeclared) > _MAX_UNDECLARED:
        raise InvalidRequest(
            f"The body has {len(undeclared)} fields that this server does not know; at most {_MAX_UNDECLARED} are "
            "allowed."
        )
    unknown = []
    for name, value in undeclared.items():
        if name in HARMLESS or value is None:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif value not in UNSUPPORTED[name] and value not in ([], {}, ""):
            raise unsupported(name, UNSUPPORTED[name])
    return unknown


def unsupported(name: str, defaults: Sequence[Any]) -> InvalidRequest:
    """The error for a field that only accepts its default. `defaults`: the values that are accepted, without null."""
    sent = f", or send {' or '.join(json.dumps(value) for value in defaults)}" if defaults else ""
    return InvalidRequest(f"`{name}` is not supported by this server; leave it out{sent}.", name)


def ignore(request: Request, names: Sequence[str]) -> None:
    """Record that fields of a request have no effect; `add_header` lists them in a header of the response.

    Raises:
        InvalidRequest: there are such fields, and the server runs with --strict-fields.
    """
    if not names:
        return
    if request.app.state.strict_fields:
        raise InvalidRequest(
            f"Field `{shorten(names[0])}` has no effect, and the server runs with --strict-fields.",
            names[0],
        )
    request.scope.setdefault(_IGNORED, []).extend(names)


def add_header(request: Request, response: Response) -> None:
    """Name the ignored fields of a request in a header of its response."""
    names = request.scope.get(_IGNORED)
    if names:
        response.headers[HEADER] = listed = ", ".join(_header_text(name) for name in names[:_MAX_NAMES])
        logger.warning("ignored request fields: %s", listed)


def _stream_options(body: BaseModel) -> dict[str, Any]:
    options = getattr(body, "stream_options", None)
    extra = options.model_extra if isinstance(options, BaseModel) else None  # not so if the field itself is undeclared
    if not extra:
        return {}
    undeclared = {f"stream_options.{name}": value for name, value in extra.items()}
    extra.clear()
    return undeclared


def _header_text(name: str) -> str:
    return quote(name[:_MAX_NAME_LENGTH], safe="[]._- ")[:_MAX_NAME_LENGTH]

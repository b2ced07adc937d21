"""Undeclared request fields: nothing is silently ignored.

A field of OpenAI's or vLLM's API that Quire does not support is refused by name, unless its value is the default.
Harmless fields are accepted and have no effect. Unknown fields are accepted and named in a response header, or refused
with --strict-fields. The same applies to fields of objects inside of a body; the tables name these without the indices
of lists, as in `messages.content.uuid`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.protocol.errors import InvalidRequest, shorten

logger = logging.getLogger(__name__)
HEADER = "x-quire-ignored-fields"
_MAX_NAMES = 20  # in the header
_MAX_NAME_LENGTH = 128  # in the header
_MAX_UNKNOWN = 1024  # names of undeclared fields of a request, without indices
_MAX_UNDECLARED = 1 << 15  # fields of a request: they are looked at on the event loop
_IGNORED = "quire.ignored_fields"  # key in the ASGI scope
_INDEX = re.compile(r"\[\d+\]")

# Accepted without effect, with any value: metadata, and hints for a provider's caches and billing.
HARMLESS = frozenset(
    {
        "client_metadata",
        "guided_decoding_backend",
        "messages.annotations",  # of an answer that is sent back
        "messages.tool_calls.index",  # of a call that was put together from a stream
        "metadata",
        "parse_context",
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
        "token_offsets",
        "user",
    }
)

# Hints for a provider's caches: harmless at any place.
_HARMLESS_ANYWHERE = frozenset({"cache_control"})

# Constraints of answers in the APIs of OpenAI, vLLM, Anthropic, llama.cpp, Ollama, SGLang and others. Where an endpoint
# does not have the field, the answer would not be constrained.
_CONSTRAINTS = frozenset(
    {"response_format", "text", "output_config", "output_format", "structured_outputs", "json_schema", "schema"}
    | {"response_schema", "output_schema", "format", "grammar", "regex", "ebnf", "structural_tag"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"}
)

# Not supported. Each name has the values that are accepted because they are the default; null and empty values always
# are.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "audio": (),
    "best_of": (1,),
    "content_parts": (),
    "context_management": (),
    "conversation": (),
    "ec_transfer_params": (),
    "extra_args": (),
    "features": (),
    "function_call": ("none",),
    "functions": (),
    "images": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "mcp_servers": (),
    "media_io_kwargs": (),
    "messages.audio": (),
    "messages.function_call": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "padding": ("do_not_pad",),
    "previous_input_messages": (),
    "prompt_embeds": (),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": (),
    "rank_fields": (["text"],),
    "reasoning_ended": (True,),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_reading_prefix_cache": (False,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": (),
    "verbosity": ("medium",),
    "watermarking": (False,),
    "web_search_options": (),
}


def set_fields(model: BaseModel) -> dict[str, Any]:
    """The fields that the client has set, undeclared ones included. Values are not copied."""
    return {name: value for name, value in model if name in model.model_fields_set}


def take_unknown_fields(body: BaseModel) -> list[str]:
    """Names of the undeclared fields of a request that have no effect; of those that differ by indices only the first.

    Undeclared fields of the body itself are removed from it. Fields that are passed to the chat template are not named:
    the template may read them.

    Raises:
        InvalidRequest: a field is not supported, or there are too many undeclared ones.
    """
    unknown: dict[str, str] = {}
    constraints = getattr(body, "constraints", None)
    for number, (name, value, passed) in enumerate(_undeclared(body)):
        kind = without_indices(name)
        if value is not None and not is_harmless(kind):
            _check_supported(name, kind, value, constraints)
            if not passed and kind not in UNSUPPORTED:
                unknown.setdefault(kind, name)
        if len(unknown) > _MAX_UNKNOWN or number > _MAX_UNDECLARED:
            raise InvalidRequest("The body has too many fields that this server does not know.", name)
    (body.model_extra or {}).clear()
    extensions = getattr(body, "vllm_xargs", None) or ()
    return [*unknown.values(), *(f"vllm_xargs.{name}" for name in extensions)]


def without_indices(name: str) -> str:
    """The path of a field without the indices of lists."""
    return _INDEX.sub("", name)


def is_harmless(kind: str) -> bool:
    """Whether an undeclared field is accepted without effect and not named. `kind`: its path without indices."""
    return kind in HARMLESS or kind.rpartition(".")[2] in _HARMLESS_ANYWHERE


def _check_supported(name: str, kind: str, value: Any, constraints: str | None) -> None:
    if value in ([], {}, ""):
        return
    if constraints is not None and (kind in _CONSTRAINTS or _is_format(value)):
        raise InvalidRequest(
            f"`{name}` is not a field of this endpoint; the constraint of an answer belongs in {constraints}.", name
        )
    if kind in UNSUPPORTED and value not in UNSUPPORTED[kind]:
        raise unsupported(name, UNSUPPORTED[kind])


def _is_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("json_schema", "json_object")


def _is_part(value: Any) -> bool:
    """Whether this is a `RequestPart`, which this package does not import."""
    return isinstance(value, BaseModel) and hasattr(value, "undeclared_inside")


def _undeclared(part: BaseModel, where: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Undeclared fields in a part of the request: path, value, and whether it is passed to the chat template."""
    passed, inside = getattr(part, "passes_undeclared", False), getattr(part, "undeclared_inside", None)
    for name, value in (part.model_extra or {}).items():
        yield f"{where}{name}", value, passed
    for name, value in () if inside is None else inside():
        yield f"{where}{name}", value, False
    for name, field in type(part).model_fields.items():
        value, path = getattr(part, name), f"{where}{field.alias or name}"
        if _is_part(value):
            yield from _undeclared(value, f"{path}.")
        elif isinstance(value, list) and value and _is_part(value[0]):
            for index, item in enumerate(value):
                yield from _undeclared(item, f"{path}[{index}].")


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


def _header_text(name: str) -> str:
    return quote(name[:_MAX_NAME_LENGTH], safe="[]._- ")[:_MAX_NAME_LENGTH]

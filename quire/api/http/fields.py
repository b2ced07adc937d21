"""Request fields beyond those that are declared: nothing is silently ignored.

A field of OpenAI's or vLLM's API that Quire does not support is refused by name, unless its value asks for nothing.
Harmless ones are accepted without effect. Fields that nobody knows are accepted and named in a response header, or
refused under --strict-fields.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from quire.api.http.errors import InvalidRequest

logger = logging.getLogger(__name__)
HEADER = "x-quire-ignored-fields"
_MOST_NAMES = 20

# Without effect, whatever their value: notes to the provider, hints for its caches and bills.
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

# Known but not supported; each with the values that ask for nothing. Null and empty never ask for anything.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "access_programs": (),
    "best_of": (1,),
    "context_management": (),
    "conversation": (),
    "ec_transfer_params": (),
    "enable_response_messages": (False,),
    "function_call": ("none",),
    "functions": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "previous_input_messages": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "watermarking": (False,),
    "web_search_options": (),
}


def judge(body: BaseModel, *, strict: bool, unread: Iterable[str] = ()) -> dict[str, str]:
    """Headers for the answer to a request with undeclared fields.

    Args:
        body: the request.
        strict: refuse fields that nobody knows.
        unread: further names that were given and have no effect.

    Raises:
        InvalidRequest: naming a field that is not supported, or not known under `strict`.
    """
    unknown = list(unread)
    for name, value in _undeclared(body):
        if name in HARMLESS or value is None:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif value not in UNSUPPORTED[name] and value not in ([], {}, ""):
            raise InvalidRequest(f"`{name}` is not supported by this server.", name)
    if not unknown:
        return {}
    if strict:
        raise InvalidRequest(
            f"Field `{unknown[0]}` would have no effect; the server runs with --strict-fields.", unknown[0]
        )
    named = ", ".join(quote(name[:100], safe="[]._- ") for name in unknown[:_MOST_NAMES])
    logger.warning("ignored request fields: %s", named)
    return {HEADER: named}


def _undeclared(body: BaseModel) -> Iterable[tuple[str, Any]]:
    yield from (body.model_extra or {}).items()
    options = getattr(body, "stream_options", None)
    if options is not None:
        yield from ((f"stream_options.{name}", value) for name, value in (options.model_extra or {}).items())

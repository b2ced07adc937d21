"""Values of vLLM's flags that Quire writes in another way. A value that cannot be translated is a ValueError."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from quire.config.types import ATTENTION_BACKENDS

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_NGRAM = ("ngram", "[ngram]", "ngram_gpu")


def count(value: str) -> str:
    """A number that may be written as 16k (16,000) or 16K (16,384). Other text is returned unchanged."""
    match = _COUNT.fullmatch(value)
    return value if match is None else str(int(Decimal(match[1]) * _UNITS[match[2]]))


def context_length(value: str) -> list[str]:
    """--max-model-len; `auto` and -1 mean as many tokens as fit into memory, which is Quire's default."""
    return [] if value in ("auto", "-1") else ["--max-model-len", count(value)]


CACHE_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
}


def cache_dtype(value: str) -> list[str]:
    """--kv-cache-dtype. Quire's int8 has scales for each head of each token; its fp8 is float8_e4m3."""
    if value not in CACHE_DTYPES:
        raise ValueError(f"Quire has {', '.join(CACHE_DTYPES)}")
    return ["--kv-cache-dtype", CACHE_DTYPES[value]]


def runner(value: str) -> list[str]:
    """--runner. `pooling` uses a causal language model as an embedder, if its files name no other pooling task."""
    flags = {"auto": [], "generate": ["--task", "generate"], "pooling": ["--convert", "embed"]}
    if value not in flags:
        raise ValueError("it expects auto, generate or pooling")
    return flags[value]


def repeated(flag: str, value: str) -> list[str]:
    """A list, in JSON or as one name."""
    names = _json(value) if value.startswith("[") else [value]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it expects a list of strings")
    return [part for name in names for part in (flag, name)]


def speculative_config(value: str) -> list[str]:
    """--speculative-config as JSON."""
    config = _object(value)
    if config.get("method", config.get("model")) not in _NGRAM:
        raise ValueError("the only method is ngram, which is Quire's --speculative-method ngram")
    tokens = config.get("num_speculative_tokens")
    return ["--speculative-method", "ngram", *([] if tokens is None else ["--num-speculative-tokens", str(tokens)])]


def structured_outputs(value: str) -> list[str]:
    """--structured-outputs-config as JSON."""
    config = _object(value)
    parser = config.pop("reasoning_parser", None)
    _check_keys(config, "backend")
    return ["--reasoning-parser", str(parser)] if parser else []


def attention_config(value: str) -> list[str]:
    """--attention-config as JSON."""
    config = _object(value)
    _check_keys(config, "backend", "flash_attn_version")
    backend, version = config.get("backend"), config.get("flash_attn_version")
    if version not in (None, 2):
        raise ValueError(f"flash_attn_version {version} cannot be set: FlashAttention 2 is used")
    return [] if backend is None else ["--attention-backend", ATTENTION_BACKENDS.get(str(backend), str(backend))]


_MEDIA_FLAGS = {"image": "--max-image-parts", "video": "--max-video-parts", "audio": "--max-audio-parts"}


def media_limits(value: str) -> list[str]:
    """--limit-mm-per-prompt: a number of each kind of media, or an object with `count`, in JSON; or image=2,audio=1."""
    limits = _object(value) if value.lstrip().startswith("{") else dict(_pairs(value))
    flags = list[str]()
    for kind, limit in limits.items():
        number = limit.get("count") if isinstance(limit, dict) else limit
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"the limit of {kind} is not a number")
        if number is not None and kind in _MEDIA_FLAGS:
            flags += [_MEDIA_FLAGS[kind], str(number)]
    return flags


def _pairs(value: str) -> Iterator[tuple[str, int]]:
    for pair in value.split(","):
        kind, equals, number = pair.partition("=")
        if not equals or not number.strip().isdecimal():
            raise ValueError("it expects a JSON object, or KIND=NUMBER separated by commas")
        yield kind.strip(), int(number)


def _check_keys(config: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(config.keys() - set(known)):
        raise ValueError(f"{', '.join(unknown)} cannot be set")


def _object(value: str) -> dict[str, Any]:
    config = _json(value)
    if not isinstance(config, dict):
        raise ValueError("it expects a JSON object")
    return config


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error

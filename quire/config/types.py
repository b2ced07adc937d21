"""Types of the values of options: numbers with units, paths, lists, tool servers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_settings import CliImplicitFlag, NoDecode

# Lists: flags are repeated and may contain commas, environment variables are split at commas.
_SHIELD = "\ufdd0"  # a noncharacter


def shield_commas(value: str) -> str:
    """Protect the commas in a flag's value, as pydantic-settings joins repeated flags with commas."""
    return value.replace(",", _SHIELD)


def _split(value: Any) -> Any:
    return [part.replace(_SHIELD, ",") for part in value.split(",")] if isinstance(value, str) else value


def _split_names(value: Any) -> Any:
    return [part for part in _split(value) if part] if isinstance(value, str) else value


def split_always(value: Any) -> Any:
    """Split a flag or variable whose items never contain commas."""
    return _split_names(value.replace(_SHIELD, ",")) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
# Origins and paths never contain commas, so the flags may be comma-separated lists as well.
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_always)]
Endpoints = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_always)]
Counts = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    NoDecode,
    BeforeValidator(split_always),
    WithJsonSchema({"accepts": "whole numbers above 0, separated by commas"}),
]


class _Secret:
    """In the metadata of a setting: its value must not be shown."""


SECRET = _Secret()
# An empty key is refused: it is most likely an unset variable, and the server would accept every client.
Keys = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"\S")], ...],
    NoDecode,
    BeforeValidator(_split),
    WithJsonSchema({"accepts": "non-empty strings"}),
    SECRET,
]
TraceDetails = Annotated[
    tuple[Literal["model", "worker", "all"], ...],
    NoDecode,
    BeforeValidator(split_always),
    WithJsonSchema({"accepts": "model, worker or all, or several of them, separated by commas"}),
]


Flag = CliImplicitFlag[bool]
LogFormat = Literal["text", "json"]
_SIGNS = frozenset("{}\n")  # of a chat template; few files have them in their name
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
RateLimit = Annotated[int, Field(ge=0, le=10**12)]
_MAX_SECONDS = 10**9  # 31 years; clocks of operating systems overflow at some larger number
Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]
SecondsOrNever = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parse_path_prefix(value: str) -> str:
    prefix = value.rstrip("/")
    if prefix and not prefix.startswith("/"):
        raise ValueError("it must begin with a slash")
    return prefix


PathPrefix = Annotated[
    str, AfterValidator(_parse_path_prefix), WithJsonSchema({"accepts": "a path that begins with a slash"})
]


class WrongKey(ValueError):
    """A key of a JSON object is not known, or its value is not valid; the message names both."""


JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_parse_json)]


def json_object_of(model: type[BaseModel]) -> tuple[AfterValidator, WithJsonSchema]:
    """Return what a JsonObject is annotated with that has the fields of a model, or is empty."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        if value:
            try:
                model.model_validate(value)
            except ValidationError as error:
                first = error.errors()[0]
                raise WrongKey(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return value

    return AfterValidator(check), WithJsonSchema({"accepts": f"a JSON object with {', '.join(model.model_fields)}"})


Size = Annotated[ByteSize, WithJsonSchema({"accepts": "a size in bytes such as 512MiB or 4GiB"})]
SizeFromKiB = Annotated[
    ByteSize,
    Field(ge=1 << 10),
    WithJsonSchema({"accepts": "a size in bytes of at least 1KiB, such as 512KiB or 25MiB"}),
]
SizeOrNone = Annotated[
    ByteSize, Field(ge=0), WithJsonSchema({"accepts": "a size in bytes, such as 512MiB or 4GiB; 0: none"})
]
SizeFromMiB = Annotated[
    ByteSize, Field(ge=1 << 20), WithJsonSchema({"accepts": "a size in bytes of at least 1MiB, such as 512MiB or 4GiB"})
]

# vLLM's names of backends, which it takes in capitals and in small letters. The last three have no counterpart.
ATTENTION_BACKENDS: Mapping[str, str] = {
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    "CPU_ATTN": "auto",
    "TORCH_SDPA": "auto",
    "XFORMERS": "auto",
}


def read_template(template: str) -> str:
    """The chat template of a setting: the text of a file, or the setting itself if it is no file but has Jinja's signs.

    Raises:
        OSError: there is no such file.
        UnicodeDecodeError: the file is not UTF-8.
    """
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null character, or UnicodeDecodeError
        if isinstance(error, UnicodeDecodeError) or not _SIGNS & set(template):
            raise
        return template


def _attention_backend(value: Any) -> Any:
    return ATTENTION_BACKENDS.get(value.upper(), value) if isinstance(value, str) else value


AttentionBackendName = Annotated[
    Literal["auto", "triton", "flash_attn", "flashinfer"], BeforeValidator(_attention_backend)
]


# The allowed MCP servers.
_ACCEPTED_SERVERS = "URL or HOST:PORT, optionally with LABEL= in front; labels must differ"
_HOST = re.compile(r"[\w.:-]+")
_LABELLED = re.compile(r"([\w.-]+)=(.+)")


def urls_by_label(servers: Sequence[str]) -> dict[str, str]:
    """URLs by label. The default label is the host name.

    Raises:
        ValueError: an address is not an HTTP address, or two labels are the same.
    """
    urls: dict[str, str] = {}
    for server in servers:
        match = _LABELLED.fullmatch(server)
        label, address = match.groups() if match else (None, server)
        url = address if "://" in address else f"http://{address}/mcp"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError(f"{address!r} is not an HTTP address")
        _ = parts.port  # raises if it is not valid
        label = str(label or parts.hostname)
        if label in urls:
            raise ValueError(f"two servers have the label {label!r}")
        urls[label] = url
    return urls


def _check_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    urls_by_label(servers)
    return servers


ToolServers = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(split_always),
    AfterValidator(_check_servers),
    WithJsonSchema({"accepts": _ACCEPTED_SERVERS}),
]


# The families of histograms whose buckets can be set; the names are vLLM's.
BucketFamily = Literal[
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "iteration_tokens",
    "request_params_n",
    "request_num_preemptions",
    "request_tokens",
    "kv_cache_residency",
]
_MAX_BUCKETS = 100  # each is a line of /metrics for each model


def _check_ascending(bounds: tuple[float, ...]) -> tuple[float, ...]:
    if any(low >= high for low, high in pairwise(bounds)):
        raise ValueError("buckets must be in ascending order")
    return bounds


_Bounds = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...],
    Field(min_length=1, max_length=_MAX_BUCKETS),
    AfterValidator(_check_ascending),
]
HistogramBuckets = Annotated[
    dict[BucketFamily, _Bounds],
    NoDecode,
    BeforeValidator(_parse_json),
    WithJsonSchema(
        {
            "accepts": f"a JSON object of lists of 1 to {_MAX_BUCKETS} ascending numbers from 0, with the keys "
            + ", ".join(get_args(BucketFamily))
        }
    ),
]
MetricsVersion = Annotated[
    str,
    StringConstraints(pattern=r"^\d{1,4}\.\d{1,4}(\.\d{1,4})?$"),
    WithJsonSchema({"accepts": "a version such as 0.12"}),
]

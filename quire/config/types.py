"""Types of the values of options; for lists see `lists.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, WithJsonSchema
from pydantic_settings import CliImplicitFlag, NoDecode

Flag = CliImplicitFlag[bool]
_SIGNS = frozenset("{}\n")  # of a chat template; few files have them in their name
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
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
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_parse_json)]
Size = Annotated[ByteSize, WithJsonSchema({"accepts": "a size in bytes such as 512MiB or 4GiB"})]
SizeFromKiB = Annotated[
    ByteSize,
    Field(ge=1 << 10),
    WithJsonSchema({"accepts": "a size in bytes of at least 1KiB, such as 512KiB or 25MiB"}),
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

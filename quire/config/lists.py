"""List settings: flags are repeated and may contain commas, environment variables are split at commas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema
from pydantic_settings import NoDecode

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
# Origins never contain commas, so the flag may be a comma-separated list as well.
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_always)]
Counts = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    NoDecode,
    BeforeValidator(split_always),
    WithJsonSchema({"accepts": "whole numbers above 0, separated by commas"}),
]
# An empty key is refused: it is most likely an unset variable, and the server would accept every client.
Keys = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"\S")], ...],
    NoDecode,
    BeforeValidator(_split),
    WithJsonSchema({"accepts": "non-empty strings"}),
]

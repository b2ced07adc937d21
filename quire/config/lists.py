"""Settings that are lists: repeated flags whose values stay whole, variables that are split at commas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, StringConstraints, WithJsonSchema
from pydantic_settings import NoDecode

_SHIELD = "\ufdd0"  # no character of any text


def shield_commas(value: str) -> str:
    """Keep a flag's value whole: pydantic-settings joins repeated flags with commas."""
    return value.replace(",", _SHIELD)


def _split(value: Any) -> Any:
    return [part.replace(_SHIELD, ",") for part in value.split(",")] if isinstance(value, str) else value


def _split_names(value: Any) -> Any:
    return [part for part in _split(value) if part] if isinstance(value, str) else value


def split_always(value: Any) -> Any:
    """The items of a flag or variable, whose own text never holds a comma."""
    return _split_names(value.replace(_SHIELD, ",")) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
# No origin holds a comma, so that the flag may be a list as well.
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_always)]
# An empty key is a variable that somebody forgot to fill: without it the server would be open to all.
Keys = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"\S")], ...],
    NoDecode,
    BeforeValidator(_split),
    WithJsonSchema({"takes": "keys that are not empty"}),
]

"""Inputs of pooling requests: texts or token ids, one or many. Errors name the one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, GetPydanticSchema, ValidationError
from pydantic_core import CoreSchema, core_schema

from quire.protocol.common import field_error
from quire.protocol.token_ids import TokenIds

MAX_LISTED = 1 << 14  # of --max-inputs
PromptInput = str | NDArray[np.int32]
_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}, "minItems": 1}
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["text"]}
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        {"type": "object", "properties": {"content": {"type": "array", "items": _PART}}, "required": ["content"]},
    ]
}


def _refuse(where: str, text: str) -> NoReturn:
    raise field_error(where, text)


def _inputs(value: Any, where: str, ids: Callable[[Any], Any]) -> PromptInput | list[str] | list[NDArray[np.int32]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(where, "Input should be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        _refuse(where, "Input should not be an empty list")
    if isinstance(value[0], str):
        return _strings(value, where)
    if not isinstance(value[0], list):
        return _ids(value, where, ids)
    _check_length(value, where)
    return [_ids(element, f"{where}[{index}]", ids) for index, element in enumerate(value)]


def _ids(value: Any, where: str, validate: Callable[[Any], Any]) -> NDArray[np.int32]:
    if not isinstance(value, list) or not value:
        _refuse(where, "Input should be a list of token ids that is not empty, as the first one is a list")
    try:
        ids: NDArray[np.int32] = validate(value)
    except ValidationError:
        _refuse(where, "Input should be a string or a list of token ids, integers from 0 to 2147483647")
    return ids


def _strings(value: list[Any], where: str) -> list[str]:
    _check_length(value, where)
    for index, text in enumerate(value):
        if type(text) is not str:
            _refuse(f"{where}[{index}]", "Input should be a string, as the first one is")
    return value


def _check_length(value: list[Any], where: str) -> None:
    if len(value) > MAX_LISTED:
        _refuse(where, f"List should have at most {MAX_LISTED} inputs, not {len(value)}")


def _text(value: Any, where: str) -> str:
    """A text, or the text of an object with `text`, or with `content` of text parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(text := value.get("text"), str):
            return text
        parts = value.get("content")
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and parts:
            return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(parts))
    _refuse(where, "Input should be a string, or an object with a string in `text` or text parts in `content`")


def _part(part: Any, where: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        _refuse(where, "Content parts should have the type `text` and a string in `text`; models here read text only")
    return text


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        _refuse(where, "Input should be a list of texts")
    if not value:
        _refuse(where, "Input should not be an empty list")
    _check_length(value, where)
    return [_text(element, f"{where}[{index}]") for index, element in enumerate(value)]


def _text_or_texts(value: Any, where: str) -> str | list[str]:
    return _texts(value, where) if isinstance(value, list) else _text(value, where)


def _sequences(value: Any, where: str) -> list[tuple[str, ...]] | tuple[str, ...]:
    """TEI's input of /predict: a text, a pair of texts, or a list of lists of one or two texts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and isinstance(value[0], list):
        _check_length(value, where)
        return [_sequence(element, f"{where}[{index}]") for index, element in enumerate(value)]
    return _sequence(value, where)


def _sequence(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and len(value) in (1, 2):
        for index, text in enumerate(value):
            if not isinstance(text, str):
                _refuse(f"{where}[{index}]", "Input should be a string")
        return tuple(value)
    _refuse(where, "Input should be a string, a list of one or two strings, or a list of such lists")


def _checked(check: Callable[[Any, str], Any], documented: dict[str, Any]) -> GetPydanticSchema:
    """A field that a function checks. It gets the name of the field, for its errors."""

    def schema(_source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo) -> Any:
            return check(value, info.field_name or "input")

        return core_schema.with_info_plain_validator_function(
            validate, metadata={"pydantic_js_functions": [lambda _schema, _handler: dict(documented)]}
        )

    return GetPydanticSchema(schema)


def _checked_inputs() -> GetPydanticSchema:
    def schema(_source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, ids: Callable[[Any], Any], info: core_schema.ValidationInfo) -> Any:
            return _inputs(value, info.field_name or "input", ids)

        return core_schema.with_info_wrap_validator_function(
            validate,
            handler.generate_schema(TokenIds),
            metadata={
                "pydantic_js_functions": [
                    lambda _schema, _handler: {
                        "anyOf": [{"type": "string"}, {**_TEXTS, "minItems": 1}, _IDS, {"type": "array", "items": _IDS}]
                    }
                ]
            },
        )

    return GetPydanticSchema(schema)


Inputs = Annotated[str | list[str] | NDArray[np.int32] | list[NDArray[np.int32]], _checked_inputs()]
Text = Annotated[str, _checked(_text, _TEXT)]
Texts = Annotated[list[str], _checked(_texts, {"type": "array", "items": _TEXT, "minItems": 1})]
TextOrTexts = Annotated[
    str | list[str],
    _checked(_text_or_texts, {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
Sequences = Annotated[
    list[tuple[str, ...]] | tuple[str, ...],
    _checked(
        _sequences,
        {
            "anyOf": [
                {"type": "string"},
                {**_TEXTS, "minItems": 1, "maxItems": 2},
                {"type": "array", "items": {**_TEXTS, "minItems": 1, "maxItems": 2}, "minItems": 1},
            ]
        },
    ),
]

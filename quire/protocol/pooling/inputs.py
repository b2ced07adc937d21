"""Inputs of pooling requests: texts or token ids, one or many. Errors name the one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, GetPydanticSchema, ValidationError
from pydantic_core import CoreSchema, core_schema

from quire.protocol.chat import part_type
from quire.protocol.common import field_error
from quire.protocol.token_ids import TokenIds

MAX_LISTED = 1 << 14  # of --max-inputs
PromptInput = str | NDArray[np.int32]
_TEXT_TYPES = ("", "text", "input_text")
_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}, "minItems": 1}
_PART = {"type": "object", "properties": {"type": {"type": "string"}}}
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        {"type": "object", "properties": {"content": {"type": "array", "items": _PART}}, "required": ["content"]},
        {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
    ]
}


@dataclass(frozen=True, slots=True)
class Content:
    """An input of content parts that are not all texts.

    Attributes:
        parts: texts, and parts with media, which endpoints replace.
        is_part: the input is itself its only part.
    """

    parts: list[Any]
    is_part: bool = False

    @property
    def text(self) -> str | None:
        """Its texts; None if it has none."""
        texts = [part if isinstance(part, str) else part.get("text") for part in self.parts]
        return "\n".join(text for text in texts if isinstance(text, str)) or None

    def path(self, where: str, index: int) -> str:
        """The path of a part, for errors; `where`: that of the input."""
        return where if self.is_part else f"{where}.content[{index}]"

    def media_paths(self, where: str) -> list[str]:
        """The paths of its parts that are not texts."""
        return [self.path(where, index) for index, part in enumerate(self.parts) if not isinstance(part, str)]


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


def _text(value: Any, where: str) -> str | Content:
    """A text, or that of an object with `text` or with `content` of text parts; other parts stay as they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(text := value.get("text"), str):
            return text
        parts = value.get("content")
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and parts:
            return parts_of(parts, f"{where}.content")
        if part_type(value) not in _TEXT_TYPES:
            return Content([value], is_part=True)
    _refuse(where, "Input should be a string, or an object with a string in `text` or content parts in `content`")


def parts_of(content: Any, where: str) -> str | Content:
    """The content of a message: its text, or its parts if they are not all texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _refuse(where, "Content should be a string or a list of content parts")
    return _content([_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _content(parts: list[Any]) -> str | Content:
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else Content(parts)


def _part(part: Any, where: str) -> Any:
    """The text of a part, or a part of another type."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        _refuse(where, "Content parts should be objects")
    if part_type(part) not in _TEXT_TYPES:
        return part
    if not isinstance(text := part.get("text"), str):
        _refuse(where, "Content parts should have a type; those of the type `text` a string in `text`")
    return text


def _texts(value: Any, where: str) -> list[str | Content]:
    return [_text(element, f"{where}[{index}]") for index, element in enumerate(_listed(value, where))]


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(where, "Input should be a list of texts")
    if not value:
        _refuse(where, "Input should not be an empty list")
    _check_length(value, where)
    return value


def _only_text(value: Any, where: str) -> str:
    text = _text(value, where)
    if isinstance(text, Content):
        index = next(index for index, part in enumerate(text.parts) if not isinstance(part, str))
        _refuse(text.path(where, index), "Content parts should have the type `text`; only texts are accepted here")
    return text


def _only_texts(value: Any, where: str) -> list[str]:
    return [_only_text(element, f"{where}[{index}]") for index, element in enumerate(_listed(value, where))]


def _text_or_texts(value: Any, where: str) -> str | Content | list[str | Content]:
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
OnlyText = Annotated[str, _checked(_only_text, _TEXT)]
OnlyTexts = Annotated[list[str], _checked(_only_texts, {"type": "array", "items": _TEXT, "minItems": 1})]
Text = Annotated[str | Content, _checked(_text, _TEXT)]
Texts = Annotated[list[str | Content], _checked(_texts, {"type": "array", "items": _TEXT, "minItems": 1})]
TextOrTexts = Annotated[
    str | Content | list[str | Content],
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

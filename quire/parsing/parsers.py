"""The reasoning and tool parsers of a model: by its chat template, or as set by the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from quire.parsing.reasoning import ReasoningTags
from quire.parsing.reasoning_registry import PARSERS, detect_tags, tags_named
from quire.parsing.tools.registry import FORMATS, ToolFormat, detect_format

_DISABLED, _DETECT = "none", "auto"
# Parsers of models whose tags end with a suffix that differs between checkpoints, as <think:6124c78e>.
_SUFFIXED = ("hy_v3", "hy_v4")
_SUFFIX = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s<>]+)>")
_TAG = re.compile(r"\A<(/?\w+)>\Z")
Value = TypeVar("Value")


def reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """The tags around a model's reasoning; None if it does not reason, or the parser is `none`.

    Raises:
        ValueError: there is no such parser.
    """
    if parser == _DISABLED:
        return None
    tags = detect_tags(template) if parser == _DETECT else tags_named(parser)
    return _with_suffix(tags, template) if parser in _SUFFIXED else tags


def tool_format(parser: str, template: str) -> ToolFormat | None:
    """The format of a model's tool calls; None if it is not known, or the parser is `none`.

    Raises:
        ValueError: there is no such parser.
    """
    if parser == _DISABLED:
        return None
    if parser not in (_DETECT, *FORMATS):
        raise ValueError(f"unknown tool call parser {parser!r}; known: {', '.join(FORMATS)}")
    syntax = detect_format(template) if parser == _DETECT else FORMATS[parser]
    return _with_suffix(syntax, template) if syntax is not None and syntax.name in _SUFFIXED else syntax


def check_parsers(reasoning_parser: str, tool_call_parser: str) -> tuple[str, str] | None:
    """The first invalid setting and its accepted values; None if both are valid."""
    if tool_call_parser not in (_DISABLED, _DETECT, *FORMATS):
        return "tool_call_parser", f"{_DETECT}, {_DISABLED}, {', '.join(FORMATS)}"
    try:
        reasoning_tags(reasoning_parser, "")
    except ValueError:
        return "reasoning_parser", f"{_DETECT}, {_DISABLED}, {', '.join(PARSERS)} or START...END"
    return None


def parser_tokens(
    reasoning: ReasoningTags | None, tools: ToolFormat | None, special: Mapping[str, int]
) -> tuple[int, ...]:
    """Ids of the special tokens that the parsers look for."""
    marks = [*_texts(reasoning), *(() if tools is None else (*_texts(tools.syntax), tools.answer))]
    return tuple(token for name, token in special.items() if any(name in mark for mark in marks))


def _with_suffix(value: Value, template: str) -> Value:
    """The value, with the suffix that tags have in a chat template added to all tags in it."""
    match = _SUFFIX.search(template)
    return value if match is None else _suffixed(value, match[1])


def _suffixed(value: Any, suffix: str) -> Any:
    if isinstance(value, str):
        return _TAG.sub(lambda tag: f"<{tag[1]}{suffix}>", value)
    if isinstance(value, tuple):
        return tuple(_suffixed(item, suffix) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _suffixed(getattr(value, field.name), suffix) for field in fields(value)})
    return value


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value and in its fields and items."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))

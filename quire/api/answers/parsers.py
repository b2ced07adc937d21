"""Which parsers a model's answers need: by its chat template, or as the settings say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quire.api.answers.reasoning import ReasoningTags, reasoning_of, tags_named
from quire.api.answers.tools.registry import FORMATS, ToolFormat, format_of


def reasoning_tags(wanted: str, template: str) -> ReasoningTags | None:
    """The tags around a model's reasoning; none if it does not reason, or nobody wants to know."""
    if wanted == "none":
        return None
    return reasoning_of(template) if wanted == "auto" else tags_named(wanted)


def tool_format(wanted: str, template: str) -> ToolFormat | None:
    """The format of a model's calls; none if it is not known, or nobody wants to know."""
    if wanted == "none":
        return None
    return format_of(template) if wanted == "auto" else FORMATS[wanted]


def shown_tokens(
    reasoning: ReasoningTags | None, tools: ToolFormat | None, special: Mapping[str, int]
) -> tuple[int, ...]:
    """Ids of the special tokens that the parsers look for."""
    marks = [*_texts(reasoning), *_texts(tools)]
    return tuple(token for name, token in special.items() if any(name in mark for mark in marks))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value and in the values that it is made of."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _texts(each)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _texts(getattr(value, one.name))

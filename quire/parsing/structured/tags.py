"""Structural tags as in vLLM and xgrammar: free text that alternates with constrained text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from quire.parsing.grammar_writer import GrammarWriter
from quire.protocol.structured import check_schema

_MAX_DEPTH = 32


def triggered_tags(writer: GrammarWriter, triggers: Sequence[str], tags: Sequence[tuple[str, str, str]], *,
              at_least_one: bool = False, only_one: bool = False) -> str:  # fmt: skip
    """Free text in which each trigger starts a tag.

    Args:
        writer: writes the grammar.
        triggers: texts.
        tags: begin, expression for the content, and end of each tag.
        at_least_one: a tag is required.
        only_one: the text ends after the first tag.

    Raises:
        ValueError: a trigger is empty, or the begin of a tag starts with none of the triggers.
    """
    writer.reserve(sum(map(len, triggers)) + sum(len(begin) for begin, _, _ in tags))
    known = set(triggers)
    sizes = sorted({len(trigger) for trigger in triggers})
    if "" in known:
        raise ValueError("A trigger of the structural tag is empty.")
    rules = []
    for begin, content, end in tags:
        possible = reversed(sizes[: bisect_right(sizes, len(begin))])
        trigger = next((begin[:size] for size in possible if begin[:size] in known), None)
        if trigger is None:
            raise ValueError(f"The tag {begin!r} starts with none of the `triggers`.")
        after_trigger = begin[len(trigger) :]
        rules.append(writer.sequence(writer.until(trigger), writer.text(after_trigger), content, writer.text(end)))
    any_tag = writer.either(rules)
    if only_one:
        return writer.rule(any_tag if at_least_one else f"{any_tag}?")
    return writer.rule(f"{any_tag}{'+' if at_least_one else '*'} {writer.anything()}")


def format_tree(writer: GrammarWriter, node: Any, depth: int = 0) -> str:
    """An expression for xgrammar's tree of formats.

    Raises:
        ValueError: a format is unknown, incomplete or not valid.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"The structural tag has more than {_MAX_DEPTH} levels.")
    kind = node.get("type") if isinstance(node, dict) else None
    try:
        match kind:
            case "const_string":
                return writer.sequence(writer.text(_text(node, "value")))
            case "json_schema":
                return writer.json(check_schema(node["json_schema"]))
            case "regex":
                return writer.regex(_text(node, "pattern"))
            case "grammar":
                return writer.grammar(_text(node, "grammar"))
            case "any_text":
                return writer.anything()
            case "sequence":
                return writer.sequence(*(format_tree(writer, child, depth + 1) for child in _items(node, "elements")))
            case "or":
                return writer.either(format_tree(writer, child, depth + 1) for child in _alternatives(node, "elements"))
            case "tag":
                return _tag(writer, node, depth)
            case "triggered_tags":
                return _triggered_tags(writer, node, depth)
            case "tags_with_separator":
                return _separated(writer, node, depth)
    except KeyError as error:
        raise ValueError(f"The `{kind}` format of the structural tag has no {error}.") from error
    raise ValueError(f"The structural tag has a format of the unknown type {str(kind)[:100]!r}.")


def _tag(writer: GrammarWriter, node: Any, depth: int) -> str:
    begin, end, content = _parts(node)
    if isinstance(content, dict) and content.get("type") == "any_text" and end:
        return writer.sequence(writer.text(begin), writer.until(end))
    return writer.sequence(writer.text(begin), format_tree(writer, content, depth + 1), writer.text(end))


def _triggered_tags(writer: GrammarWriter, node: Any, depth: int) -> str:
    triggers = _items(node, "triggers")
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise ValueError("The `triggers` of the structural tag must be strings.")
    tags = [
        (begin, format_tree(writer, content, depth + 1), end)
        for begin, end, content in map(_parts, _alternatives(node, "tags"))
    ]
    return triggered_tags(
        writer, triggers, tags,
        at_least_one=bool(node.get("at_least_one")), only_one=bool(node.get("stop_after_first")),
    )  # fmt: skip


def _separated(writer: GrammarWriter, node: Any, depth: int) -> str:
    tag = writer.either(_tag(writer, element, depth + 1) for element in _alternatives(node, "tags"))
    optional = "" if node.get("at_least_one") else "?"
    if node.get("stop_after_first"):
        return writer.rule(f"{tag}{optional}")
    more = writer.sequence(writer.text(_text(node, "separator")), tag)
    return writer.rule(f"{writer.rule(f'{tag} {more}*')}{optional}")


def _parts(node: Any) -> tuple[str, str, Any]:
    """Begin, end and content of a tag."""
    if not isinstance(node, dict):
        raise ValueError("A tag of the structural tag must be an object.")
    return _text(node, "begin"), _text(node, "end"), node["content"]


def _text(node: dict[str, Any], name: str) -> str:
    value = node[name]
    if not isinstance(value, str):
        raise ValueError(f"`{name}` of the structural tag must be a string.")
    return value


def _items(node: dict[str, Any], name: str) -> list[Any]:
    value = node[name]
    if not isinstance(value, list):
        raise ValueError(f"`{name}` of the structural tag must be an array.")
    return value


def _alternatives(node: dict[str, Any], name: str) -> list[Any]:
    """Items of which one is chosen, so there must be one."""
    items = _items(node, name)
    if not items:
        raise ValueError(f"`{name}` of the `{node['type']}` format of the structural tag has no entry.")
    return items

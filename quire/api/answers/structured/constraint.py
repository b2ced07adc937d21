"""From a request's fields to the grammar that its answer is held to."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any, Never

import orjson

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.reasoning import ReasoningTags
from quire.api.answers.structured.checker import GrammarChecker
from quire.api.answers.structured.tags import tree, triggered
from quire.api.answers.tools.choice import ToolPlan
from quire.api.answers.tools.registry import ToolFormat
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredFields,
    StructuredOutputs,
)


class Thought(Enum):
    """What may stand before the text that is held to a form."""

    NONE = "nothing"
    POSSIBLE = "a block of reasoning, or none"
    OPEN = "the rest of a block of reasoning, which the prompt has begun"


def grammar_of(
    structure: StructuredOutputs | ResponseFormat | None,
    special: Mapping[str, int],
    tags: ReasoningTags | None = None,
    thought: Thought = Thought.NONE,
    plan: ToolPlan | None = None,
    lead: str = "",
) -> str:
    """The grammar.

    Args:
        structure: what the answer is held to, from its beginning or from the end of the reasoning on.
        special: the tokenizer's special tokens.
        tags: around the reasoning, if there is any.
        thought: what there may be of it.
        plan: of tools whose calls are held to a form; one that has to come takes the place of `structure`.
        lead: what the model writes before an answer that is no call.

    Raises:
        InvalidRequest: it is not understood. Whether the grammar is one is only seen when it is compiled.
    """
    writer = GrammarWriter(special)
    try:
        answer = None if structure is None else _expression(writer, structure)
        if answer is not None:
            answer = writer.sequence(writer.text(lead), answer)
    except ValueError as error:
        raise InvalidRequest(f"The grammar cannot be read: {error}", "structured_outputs") from error
    if plan is not None and (answer is None or plan.required or plan.writable):
        answer = plan.expression(writer, answer)
    return writer.finish(_after_thought(writer, answer or writer.anything(), tags, thought))


def _after_thought(writer: GrammarWriter, answer: str, tags: ReasoningTags | None, thought: Thought) -> str:
    """The expression behind what there may be of reasoning."""
    if tags is None or thought is Thought.NONE:
        return answer
    ends = writer.either(writer.until(end) for end in tags.ends)
    rest = f"{ends} {writer.spaces()}"
    start = writer.either(map(writer.text, tags.starts))
    if thought is Thought.OPEN:
        return f"{start}? {rest} {answer}" if tags.begun else f"{rest} {answer}"
    block = writer.rule(f"{start} {rest}")
    return f"{block}? {answer}"


def _expression(writer: GrammarWriter, structure: StructuredOutputs | ResponseFormat) -> str:
    match structure:
        case JsonObjectFormat():
            return writer.json({"type": "object"})
        case JsonSchemaFormat(json_schema=named):
            return writer.json({"type": "object"} if named.content is None else named.content)
        case StructuralTagFormat():
            return _tags(writer, structure)
        case StructuredOutputs():
            return _structured(writer, structure)
    raise AssertionError(structure)


def _structured(writer: GrammarWriter, structure: StructuredOutputs) -> str:
    match structure.kinds[0]:
        case "json":
            return writer.json(_schema(structure, _parsed(structure.json_form, "json")))
        case "json_object":
            return writer.json(_schema(structure, {"type": "object"}))
        case "regex":
            return writer.regex(structure.regex or "")
        case "choice":
            return writer.choice(structure.choice or ())
        case "grammar":
            return writer.grammar(structure.grammar or "")
        case _:
            content = _parsed(structure.structural_tag, "structural_tag")
            return _tags(writer, StructuralTagFormat.model_validate({**content, "type": "structural_tag"}))


def _tags(writer: GrammarWriter, given: StructuralTagFormat) -> str:
    if given.format is not None:
        return tree(writer, given.format)
    tags = [(one.begin, writer.json(one.content), one.end) for one in given.structures or ()]
    return triggered(writer, given.triggers or (), tags)


def _schema(structure: StructuredOutputs, schema: Any) -> Any:
    """The schema with the options that are meant for it."""
    if structure.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {}
    if structure.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if structure.whitespace_pattern is not None:
        options["whitespace_pattern"] = structure.whitespace_pattern
    return {**schema, "x-guidance": options} if options and isinstance(schema, dict) else schema


def _closed(schema: Any) -> Any:
    """The schema, with no properties beyond those named, wherever it does not say."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _parsed(given: Any, name: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        content = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        _refuse(f"`{name}` is no JSON: {error}")
    if not isinstance(content, dict | bool):
        _refuse(f"`{name}` is JSON, but no schema.")
    return content


def _refuse(message: str) -> Never:
    raise InvalidRequest(message, "structured_outputs")


async def checked_grammar(
    body: StructuredFields,
    checker: GrammarChecker | None,
    tags: ReasoningTags | None,
    tools: ToolFormat | None,
    thought: Thought = Thought.NONE,
    plan: ToolPlan | None = None,
) -> str:
    """The grammar of a request's answer, which can be used; empty if any text will do.

    Raises:
        InvalidRequest: it cannot be had.
    """
    structure = body.structure
    if structure is None and (plan is None or not plan.holds):
        return ""
    if checker is None:
        _refuse("This model has no structured outputs.")
    lead = "" if tools is None else tools.answer
    write = partial(grammar_of, structure, tags=tags, thought=thought, plan=plan, lead=lead)
    return await checker.make(write, "tools" if structure is None else body.structure_field)

"""The grammar that constrains the answer to a request, from the request's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

from pydantic import ValidationError

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.reasoning import ReasoningTags
from quire.parsing.structured.checker import CheckedGrammar, GrammarChecker
from quire.parsing.structured.tags import format_tree, triggered_tags
from quire.parsing.tools.choice import ToolPlan
from quire.parsing.tools.registry import ToolFormat
from quire.protocol.errors import InvalidRequest
from quire.protocol.strict_json import parse_json
from quire.protocol.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredFields,
    StructuredOutputs,
    check_schema,
)
from quire.workers.tenant import current_tenant

_MAX_PROBLEMS = 3  # in an error about a structural tag
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are not schemas


class ReasoningPrefix(Enum):
    """The reasoning that may precede a constrained answer."""

    NONE = "no reasoning"
    POSSIBLE = "a block of reasoning, or no reasoning"
    OPEN = "the rest of a block of reasoning that began in the prompt"


def grammar_of(
    structure: StructuredOutputs | ResponseFormat | None,
    special: Mapping[str, int],
    tags: ReasoningTags | None = None,
    prefix: ReasoningPrefix = ReasoningPrefix.NONE,
    plan: ToolPlan | None = None,
    lead: str = "",
    field: str = "structured_outputs",
) -> str:
    """The grammar of an answer.

    Args:
        structure: constrains the text after the reasoning; None for free text.
        special: ids of special tokens by their texts.
        tags: around the reasoning; None if the model does not reason.
        prefix: reasoning that may precede the text.
        plan: tools whose calls are constrained; a required call replaces `structure`.
        lead: text that the model writes before an answer that is not a call.
        field: the request field of `structure`, for errors.

    Raises:
        InvalidRequest: the fields are not valid. Other problems are found when the grammar is compiled.
    """
    writer = GrammarWriter(special)
    answer = None
    if structure is not None:
        with _errors_of(field):
            answer = writer.sequence(writer.text(lead), _expression(writer, structure))
    if plan is not None and (answer is None or plan.required or plan.has_grammar):
        with _errors_of("tools"):
            answer = plan.expression(writer, answer)
    with _errors_of(field if plan is None else "tools"):
        return writer.finish(_after_reasoning(writer, answer or writer.anything(), tags, prefix))


@contextmanager
def _errors_of(field: str) -> Iterator[None]:
    """Raise problems with the value of a request field as errors that name it."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(str(error), field) from error


def _after_reasoning(writer: GrammarWriter, answer: str, tags: ReasoningTags | None, prefix: ReasoningPrefix) -> str:
    """The expression after reasoning."""
    if tags is None or prefix is ReasoningPrefix.NONE:
        return answer
    ends = writer.either(writer.until(end) for end in tags.ends)
    ending = f"{ends} {writer.spaces()}"
    start = writer.either(map(writer.text, tags.starts))
    if prefix is ReasoningPrefix.OPEN:
        return f"{start}? {ending} {answer}" if tags.implicit_start else f"{ending} {answer}"
    block = writer.rule(f"{start} {ending}")
    return f"{block}? {answer}"


def _expression(writer: GrammarWriter, structure: StructuredOutputs | ResponseFormat) -> str:
    match structure:
        case JsonObjectFormat(content=schema):
            return writer.json({"type": "object"} if schema is None else schema)
        case JsonSchemaFormat():
            return writer.json(structure.held)
        case StructuralTagFormat():
            return _tags(writer, structure)
        case StructuredOutputs():
            return _structured(writer, structure)
    raise AssertionError(structure)


def _structured(writer: GrammarWriter, structure: StructuredOutputs) -> str:
    match structure.kinds[0]:
        case "json":
            return writer.json(_schema(structure, check_schema(_parsed(structure.json_schema))))
        case "json_object":
            return writer.json(_schema(structure, {"type": "object"}))
        case "regex":
            return writer.regex(structure.regex or "")
        case "choice":
            return writer.choice(structure.choice or ())
        case "grammar":
            return writer.grammar(structure.grammar or "")
        case _:
            return _tags(writer, _structural_tag(_parsed(structure.structural_tag)))


def _structural_tag(content: Any) -> StructuralTagFormat:
    if not isinstance(content, dict):
        raise ValueError("A structural tag must be an object.")
    try:
        return StructuralTagFormat.model_validate({**content, "type": "structural_tag"})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MAX_PROBLEMS]
        texts = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ") for problem in problems)
        raise ValueError(f"The structural tag is not valid: {'; '.join(texts)}") from error


def _tags(writer: GrammarWriter, content: StructuralTagFormat) -> str:
    if content.format is not None:
        return format_tree(writer, content.format)
    tags = [(structure.begin, writer.json(structure.content), structure.end) for structure in content.structures or ()]
    return triggered_tags(writer, content.triggers or (), tags)


def _schema(structure: StructuredOutputs, schema: Any) -> Any:
    """The schema with the options of `structured_outputs` that apply to JSON."""
    schema = {} if schema is True else schema
    if structure.disable_additional_properties:
        schema = _without_additional_properties(schema)
    options: dict[str, Any] = {}
    if structure.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if structure.whitespace_pattern is not None:
        options["whitespace_pattern"] = structure.whitespace_pattern
    return {**schema, "x-guidance": options} if options and isinstance(schema, dict) else schema


def _without_additional_properties(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where it is not set."""
    if isinstance(schema, list):
        return [_without_additional_properties(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _closed(keyword: str, value: Any) -> Any:
    """The value of a keyword of a schema, with `additionalProperties: false` in all schemas in it."""
    if keyword in _VALUES:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _without_additional_properties(part) for name, part in value.items()}
    return _without_additional_properties(value)


def _parsed(value: Any) -> Any:
    """A schema or a structural tag, which may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"The text cannot be parsed as JSON: {error}") from error


async def checked_grammar(
    body: StructuredFields,
    checker: GrammarChecker | None,
    tags: ReasoningTags | None,
    tools: ToolFormat | None,
    prefix: ReasoningPrefix = ReasoningPrefix.NONE,
    plan: ToolPlan | None = None,
) -> CheckedGrammar | None:
    """The checked grammar of the answer to a request; None if its text is not constrained.

    Args:
        body: the request.
        checker: checks grammars of the model; None if the model does not support structured outputs.
        tags: around the model's reasoning.
        tools: format of the model's tool calls.
        prefix: reasoning that may precede the answer.
        plan: the plan of the request's tools.

    Raises:
        InvalidRequest: the grammar is not valid or not supported.
    """
    structure = body.structure
    if structure is None and (plan is None or not plan.needs_grammar):
        return None
    from_tools = structure is None or (plan is not None and plan.required)
    source = "tools" if from_tools else body.structure_field
    if checker is None:
        raise InvalidRequest("Structured outputs are not supported for this model.", source)
    lead = "" if tools is None else tools.answer
    write = partial(grammar_of, structure, tags=tags, prefix=prefix, plan=plan, lead=lead, field=body.structure_field)
    return await checker.check(write, source, tenant=current_tenant())

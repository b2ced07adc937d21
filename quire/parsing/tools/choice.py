"""The tools and `tool_choice` of a request: which calls to look for, and the grammar that constrains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas
from quire.parsing.tools.custom import is_strict, schema_of
from quire.parsing.tools.registry import HasGrammar, ToolFormat
from quire.protocol.chat import AllowedTools, ChatRequest, FunctionTool, NamedTool
from quire.protocol.custom import CustomTool, NamedCustomTool
from quire.protocol.errors import InvalidRequest

_ANYTHING: dict[str, Any] = {"type": "object"}
_Tool = FunctionTool | CustomTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The tool calls that an answer may contain.

    Attributes:
        format: the format of the calls.
        schemas: schemas of the functions' arguments.
        required: the answer must be a call.
        named: the request names the one function that must be called.
        parallel: there may be more than one call.
        strict: names of the functions whose arguments must match their schemas even if no call is required.
        custom: names of the custom tools among the functions.
    """

    format: ToolFormat
    schemas: Schemas
    required: bool = False
    named: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()

    @property
    def needs_grammar(self) -> bool:
        """Whether the tools require answers to be constrained by a grammar."""
        return self.required or (bool(self.strict) and self.has_grammar)

    @property
    def has_grammar(self) -> bool:
        """Whether the syntax of the format can be written as a grammar."""
        return isinstance(self.format.syntax, HasGrammar)

    def expression(self, writer: GrammarWriter, other: str | None) -> str:
        """The grammar expression of an answer. `other`: that of an answer without calls; None if it is free text."""
        schemas = {name: self._schema(name, schema) for name, schema in self.schemas.items()}
        calls = self.format.grammar(writer, schemas, parallel=self.parallel and not self.named)
        if self.required:
            return calls
        if other is not None:
            return writer.rule(f"{calls} | {other}")
        # If the marks are special tokens, free text cannot contain them, and every call matches the grammar.
        text = f"{writer.text(self.format.answer)} {writer.anything()}" if self.format.answer else ""
        return writer.rule(f"{calls} | {text}" if text else f"{writer.anything()} {calls}?")

    def _schema(self, name: str, schema: Any) -> Any:
        return schema if self.required or name in self.strict else _ANYTHING


def tool_plan(body: ChatRequest, known: ToolFormat | None) -> ToolPlan | None:
    """The calls to look for; None if the request has no tools or disables them.

    Args:
        body: the request.
        known: format of the model's tool calls; None if it is not known.

    Raises:
        InvalidRequest: the fields contradict each other, or the format is not known.
    """
    choice = body.tool_choice
    tools = body.tools or []
    if not tools:
        # An empty list may come with "auto": clients send both if none of their tools is switched on.
        if choice not in (None, "none") and (body.tools is None or choice != "auto"):
            raise InvalidRequest("When using `tool_choice`, `tools` must be set, and not be empty.", "tool_choice")
        return None
    if choice == "none":
        return None
    _check_names(tools)
    named = isinstance(choice, NamedTool | NamedCustomTool)
    required = choice == "required" or named
    if isinstance(choice, NamedTool | NamedCustomTool):
        tools = _chosen(tools, [choice])
    if isinstance(choice, AllowedTools):
        required = choice.allowed_tools.mode == "required"
        tools = _chosen(tools, choice.allowed_tools.tools)
    if known is None:
        raise InvalidRequest(
            "The format of this model's tool calls is not known: start the server with --tool-call-parser, or send "
            '`tool_choice`: "none" to pass the tools to the prompt and leave calls in the text.',
            "tool_choice" if choice is not None else "tools",
        )
    plan = ToolPlan(
        format=known.constrained if required else known,
        schemas={tool.name: schema_of(tool) for tool in tools},
        required=required,
        named=named,
        parallel=body.parallel_tool_calls is not False,
        strict=frozenset(tool.name for tool in tools if is_strict(tool)),
        custom=frozenset(tool.name for tool in tools if isinstance(tool, CustomTool)),
    )
    if plan.strict & plan.custom and not plan.needs_grammar:
        raise InvalidRequest(
            'A custom tool\'s `format` can be enforced for this model only with `tool_choice` "required" or a named '
            "tool.",
            "tools",
        )
    return plan


def _check_names(tools: Sequence[_Tool]) -> None:
    seen: set[str] = set()
    for name in (tool.name for tool in tools):
        if name in seen:
            raise InvalidRequest(f"Two of the `tools` have the name {name!r}; names must be unique.", "tools")
        seen.add(name)


def _chosen(tools: Sequence[_Tool], choices: Sequence[NamedTool | NamedCustomTool]) -> list[_Tool]:
    names = {(choice.type, choice.name) for choice in choices}
    chosen = [tool for tool in tools if (tool.type, tool.name) in names]
    unknown = names - {(tool.type, tool.name) for tool in chosen}
    if unknown:
        kind, name = min(unknown)
        raise InvalidRequest(
            f"`tool_choice` refers to the {kind} {name!r}, which is not one of the `tools`.", "tool_choice"
        )
    return chosen

"""What a request says about its tools, and what follows for its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas
from quire.api.answers.tools.custom import is_strict, schema_of
from quire.api.answers.tools.registry import ToolFormat, Writable
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import AllowedTools, ChatRequest, FunctionTool, NamedTool
from quire.api.protocol.custom import CustomTool, NamedCustomTool

_ANYTHING: dict[str, Any] = {"type": "object"}
_Tool = FunctionTool | CustomTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How calls come in an answer.

    Attributes:
        format: in which they are written.
        schemas: of the functions' arguments.
        required: there has to be a call.
        named: of one function, which the request names.
        several: there may be more than one.
        strict: names of the functions whose arguments are held to their schemas even where no call has to be.
        custom: names of those that are custom tools.
    """

    format: ToolFormat
    schemas: Schemas
    required: bool = False
    named: bool = False
    several: bool = True
    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()

    @property
    def holds(self) -> bool:
        """Whether answers are held to a grammar because of the tools."""
        return self.required or (bool(self.strict) and self.writable)

    @property
    def writable(self) -> bool:
        """Whether there is a grammar of the format."""
        return isinstance(self.format.form, Writable)

    def expression(self, writer: GrammarWriter, other: str | None) -> str:
        """What answers are held to; `other`: the expression of an answer without calls, if it is held to one."""
        schemas = {name: self._held(name, schema) for name, schema in self.schemas.items()}
        calls = self.format.grammar(writer, schemas, several=self.several and not self.named)
        if self.required:
            return calls
        if other is not None:
            return writer.rule(f"{calls} | {other}")
        # Where marks are special tokens, free text cannot hold them: a call is either as it should be, or none.
        text = f"{writer.text(self.format.answer)} {writer.anything()}" if self.format.answer else ""
        return writer.rule(f"{calls} | {text}" if text else f"{writer.anything()} {calls}?")

    def _held(self, name: str, schema: Any) -> Any:
        return schema if self.required or name in self.strict else _ANYTHING


def tool_plan(body: ChatRequest, known: ToolFormat | None) -> ToolPlan | None:
    """The plan; none if the answer's text is to stay as it is.

    Args:
        body: the request.
        known: the format that the model writes calls in.

    Raises:
        InvalidRequest: the fields do not fit together, or the format is not known.
    """
    choice, tools = body.tool_choice, body.tools or []
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
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
            "How this model writes calls is not known: start the server with --tool-call-parser, or send "
            '`tool_choice`: "none" to have the tools in the prompt and calls left in the text.',
            "tool_choice" if choice is not None else "tools",
        )
    plan = ToolPlan(
        format=known.held if required else known,
        schemas={tool.name: schema_of(tool) for tool in tools},
        required=required,
        named=named,
        several=body.parallel_tool_calls is not False,
        strict=frozenset(tool.name for tool in tools if is_strict(tool)),
        custom=frozenset(tool.name for tool in tools if isinstance(tool, CustomTool)),
    )
    if plan.strict & plan.custom and not plan.holds:
        raise InvalidRequest(
            "This model's calls cannot be held to the `format` of a custom tool, unless `tool_choice` demands one.",
            "tools",
        )
    return plan


def _check_names(tools: Sequence[_Tool]) -> None:
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"Two tools are called {name!r}.", "tools")


def _chosen(tools: Sequence[_Tool], wanted: Sequence[NamedTool | NamedCustomTool]) -> list[_Tool]:
    names = {(one.type, one.name) for one in wanted}
    chosen = [tool for tool in tools if (tool.type, tool.name) in names]
    unknown = names - {(tool.type, tool.name) for tool in chosen}
    if unknown:
        kind, name = min(unknown)
        raise InvalidRequest(f"`tool_choice` names the {kind} {name!r}, which is none of the `tools`.", "tool_choice")
    return chosen

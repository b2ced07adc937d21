"""What a request says about its tools, and what follows for its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.errors import InvalidRequest
from quire.api.protocol.chat import AllowedTools, ChatRequest, NamedTool, Tool
from quire.api.structured.writer import GrammarWriter
from quire.api.tools.calls import Schemas
from quire.api.tools.registry import ToolFormat, Writable

_ANYTHING: dict[str, Any] = {"type": "object"}


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
    """

    format: ToolFormat
    schemas: Schemas
    required: bool = False
    named: bool = False
    several: bool = True
    strict: frozenset[str] = frozenset()

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
    required = choice == "required" or isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool):
        tools = _chosen(tools, [choice.function.name])
    if isinstance(choice, AllowedTools):
        required = choice.allowed_tools.mode == "required"
        tools = _chosen(tools, [one.function.name for one in choice.allowed_tools.tools])
    if known is None:
        raise InvalidRequest(
            "How this model writes calls is not known: start the server with --tool-call-parser, or send "
            '`tool_choice`: "none" to have the tools in the prompt and calls left in the text.',
            "tool_choice" if choice is not None else "tools",
        )
    return ToolPlan(
        format=known.held if required else known,
        schemas={tool.function.name: tool.function.parameters or _ANYTHING for tool in tools},
        required=required,
        named=isinstance(choice, NamedTool),
        several=body.parallel_tool_calls is not False,
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
    )


def _check_names(tools: Sequence[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"Two tools are called {name!r}.", "tools")


def _chosen(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    unknown = [name for name in names if name not in {tool.function.name for tool in tools}]
    if unknown:
        raise InvalidRequest(f"`tool_choice` names {unknown[0]!r}, which is none of the `tools`.", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]

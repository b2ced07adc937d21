"""Custom tools, whose input is plain text instead of JSON; for chat completions and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field

from quire.protocol.common import RequestPart, StrictModel
from quire.protocol.structured import Grammar, TextFormat

ToolName = Annotated[str, Field(min_length=1, max_length=256)]
MAX_TOOLS = 1024  # of a request; OpenAI accepts 128


class InputGrammar(StrictModel):
    """A grammar of the input."""

    syntax: Literal["lark", "regex"]
    definition: Grammar


class GrammarFormat(StrictModel):
    """Input that matches a grammar, in chat completions."""

    type: Literal["grammar"]
    grammar: InputGrammar


class FlatGrammarFormat(InputGrammar):
    """Input that matches a grammar, in responses."""

    type: Literal["grammar"]


class CustomDefinition(StrictModel):
    """A tool that the model may call with plain text."""

    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(StrictModel):
    """A custom tool as one of the tools."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name


class CustomName(RequestPart):
    """Names a custom tool."""

    name: str


class NamedCustomTool(RequestPart):
    """Requires a call of one custom tool."""

    type: Literal["custom"]
    custom: CustomName

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name


class CalledCustom(BaseModel):
    """A called custom tool and its input."""

    name: str
    input: str


class CustomToolCall(BaseModel):
    """A call of a custom tool in an answer."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustom


class ResponseCustomTool(RequestPart):
    """A custom tool in responses."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | FlatGrammarFormat, Field(discriminator="type")] | None = None


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind == "custom" else "other"


# Discriminates a union with the tags "custom" and "other"; the `type` of functions may be left out.
BY_KIND = Discriminator(_kind)

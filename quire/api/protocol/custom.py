"""Custom tools: they take a text where functions take JSON. Shapes of chat completions and of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from quire.api.protocol.structured import Grammar, TextFormat

ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class InputGrammar(BaseModel):
    """A grammar of texts."""

    model_config = ConfigDict(extra="forbid")

    syntax: Literal["lark", "regex"]
    definition: Grammar


class GrammarFormat(BaseModel):
    """Texts of a grammar, as chat completions have them."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["grammar"]
    grammar: InputGrammar


class FlatGrammarFormat(InputGrammar):
    """Texts of a grammar, as responses have them."""

    type: Literal["grammar"]


class CustomDefinition(BaseModel):
    """A tool that the model may call with a text."""

    model_config = ConfigDict(extra="forbid")

    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(BaseModel):
    """The same among other tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        """The tool's."""
        return self.custom.name


class CustomName(BaseModel):
    """A custom tool."""

    name: str


class NamedCustomTool(BaseModel):
    """The custom tool that has to be called."""

    type: Literal["custom"]
    custom: CustomName

    @property
    def name(self) -> str:
        """The tool's."""
        return self.custom.name


class CalledCustom(BaseModel):
    """A custom tool and the text that it was called with."""

    name: str
    input: str


class CustomToolCall(BaseModel):
    """A call of a custom tool that the model wants to be made."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustom


class ResponseCustomTool(BaseModel):
    """A custom tool, as responses have it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | FlatGrammarFormat, Field(discriminator="type")] | None = None


def _kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "custom" if kind == "custom" else "other"


# Of a union with tags "custom" and "other"; functions need not say that they are some.
BY_KIND = Discriminator(_kind)

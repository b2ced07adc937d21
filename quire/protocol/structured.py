"""Fields of structured outputs: response_format, structured_outputs, and the deprecated guided_* fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quire.protocol.common import ListOf, StrictModel, field_error

# Keywords that only describe a value.
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated"}
    | {"readOnly", "writeOnly"}
)
_KEYWORDS = frozenset(
    {"type", "enum", "const", "format", "pattern", "properties", "patternProperties", "additionalProperties"}
    | {"required", "propertyNames", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems"}
    | {"contains", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "minimum", "maximum"}
    | {"exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"}
    | {"$ref", "$dynamicRef", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems", "nullable", "x-guidance"}
)


_SCHEMA_NAMES = ("input_schema", "inputSchema", "schema", "json_schema")  # of a function's arguments, in other APIs


def check_schema(schema: Any) -> Any:
    """Refuse an object that contains a schema instead of being one: it would allow any JSON.

    Raises:
        PydanticCustomError: none of its fields is a keyword of JSON schemas.
    """
    unknown = set(schema) - _ANNOTATIONS if isinstance(schema, dict) else set()
    if unknown and unknown.isdisjoint(_KEYWORDS):
        raise PydanticCustomError(
            "no_schema",
            "This should be a JSON schema, but none of its fields ({names}) is a keyword of JSON schemas",
            {"names": ", ".join(name[:100] for name in sorted(unknown)[:5])},
        )
    return schema


def check_parameters(function: Any) -> Any:
    """Refuse a function that has the schema of its arguments under another API's name: they would not be held to it."""
    if isinstance(function, dict) and function.get("parameters") is None:
        misplaced = next((name for name in _SCHEMA_NAMES if isinstance(function.get(name), dict)), None)
        if misplaced is not None:
            raise PydanticCustomError(
                "misplaced_schema",
                "The schema of the arguments belongs in `parameters`, not in `{name}`",
                {"name": misplaced},
            )
    return function


JsonSchema = Annotated[dict[str, Any] | bool, AfterValidator(check_schema)]
# Longer grammars are refused; llguidance's own limits usually take effect earlier.
MAX_GRAMMAR_LENGTH = 1 << 18
_MAX_TAGS = 1024  # structures, and triggers, of a structural tag
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Choices = Annotated[ListOf[Annotated[str, Field(max_length=1 << 14)]], Field(min_length=1, max_length=1 << 12)]


class NamedSchema(StrictModel):
    """A schema in `response_format`. It is always enforced, also without `strict`."""

    name: str | None = None
    description: str | None = None
    content: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object, or JSON of a schema, as in llama.cpp."""

    type: Literal["json_object"]
    content: JsonSchema | None = Field(None, alias="schema")


class JsonSchemaFormat(StrictModel):
    """JSON of a schema: in `json_schema` as in chat completions, or in `schema` as in the Responses API."""

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    name: str | None = None
    description: str | None = None
    content: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def held(self) -> JsonSchema | None:
        """The schema, from whichever place."""
        return self.content if self.json_schema is None else self.json_schema.content

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.json_schema is None) == (self.content is None):
            raise PydanticCustomError(
                "schema_once",
                "The type `json_schema` needs its schema once, in `json_schema.schema` or in `schema`",
            )
        return self


class TagStructure(StrictModel):
    """JSON of a schema between `begin` and `end`."""

    begin: Annotated[str, Field(min_length=1)]
    content: JsonSchema = Field(alias="schema")
    end: str = ""


class StructuralTagFormat(StrictModel):
    """Free text in which triggers start one of the structures, or a tree of formats as in xgrammar."""

    type: Literal["structural_tag"]
    structures: Annotated[ListOf[TagStructure], Field(max_length=_MAX_TAGS)] | None = None
    triggers: Annotated[ListOf[Annotated[str, Field(min_length=1)]], Field(max_length=_MAX_TAGS)] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.format is None) == (not self.structures or not self.triggers):
            raise field_error(
                "response_format", "A structural tag needs either `format`, or both `structures` and `triggers`."
            )
        return self


def _check_place(value: Any) -> Any:
    """Refuse a schema in a format that holds no answer to it."""
    if not isinstance(value, dict):
        return value
    kind, misplaced = value.get("type"), [name for name in ("json_schema", "schema") if value.get(name) is not None]
    if misplaced and (kind in (None, "text") or (kind == "json_object" and misplaced[0] == "json_schema")):
        raise PydanticCustomError(
            "misplaced_schema",
            'A format with a schema in `{name}` needs the `type` "json_schema"',
            {"name": misplaced[0]},
        )
    return value


TextOrJsonFormat = Annotated[
    Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")],
    BeforeValidator(_check_place),
]
ResponseFormat = Annotated[
    Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")],
    BeforeValidator(_check_place),
]


class StructuredOutputs(StrictModel):
    """vLLM's structured outputs: exactly one kind of constraint, and options for JSON."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: JsonSchema | Grammar | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = Field(False, description="without effect: there is one backend")

    @property
    def kinds(self) -> list[str]:
        """The kinds of constraints that are set."""
        constraints = {
            "json": self.json_schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
            "json_object": self.json_object or None, "structural_tag": self.structural_tag,
        }  # fmt: skip
        return [name for name, value in constraints.items() if value is not None]

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(self.kinds) != 1:
            raise field_error(
                "structured_outputs",
                "You can only use one kind of structured outputs constraint (json, regex, choice, grammar, "
                f"json_object or structural_tag), and one is required: {', '.join(self.kinds) or 'none'} given.",
            )
        for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, False) and self.kinds[0] not in ("json", "json_object"):
                raise field_error(
                    f"structured_outputs.{name}",
                    f"`{name}` can only be used with `json` or `json_object`, not with `{self.kinds[0]}`.",
                )
        return self


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")


class StructuredFields(BaseModel):
    """The fields of structured outputs in a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | Grammar | None = Field(None, description="deprecated name of structured_outputs.json")
    guided_regex: Grammar | None = Field(None, description="deprecated name of structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="deprecated name of structured_outputs.choice")
    guided_grammar: Grammar | None = Field(None, description="deprecated name of structured_outputs.grammar")
    guided_whitespace_pattern: str | None = Field(None, description="deprecated; used with guided_json")
    structural_tag: Grammar | None = Field(None, description="deprecated name of structured_outputs.structural_tag")

    @property
    def structure(self) -> StructuredOutputs | ResponseFormat | None:
        """The constraint of the answer, from whichever field; None for free text."""
        if self.response_format is not None and not isinstance(self.response_format, TextFormat):
            return self.response_format
        if self.structured_outputs is not None:
            return self.structured_outputs
        return self._guided

    @property
    def structure_field(self) -> str:
        """Name of the field that sets the constraint."""
        if self._guided_kinds:
            return next(name for name in _GUIDED if getattr(self, name) is not None)
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def _guided(self) -> StructuredOutputs | None:
        kinds = self._guided_kinds
        if not kinds:
            return None
        return StructuredOutputs.model_validate({**kinds, "whitespace_pattern": self.guided_whitespace_pattern})

    @property
    def _guided_kinds(self) -> dict[str, Any]:
        constraints = {
            "json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice,
            "grammar": self.guided_grammar, "structural_tag": self.structural_tag,
        }  # fmt: skip
        return {name: value for name, value in constraints.items() if value is not None}

    @model_validator(mode="after")
    def _one_field(self) -> Self:
        formatted = self.response_format is not None and not isinstance(self.response_format, TextFormat)
        if formatted + (self.structured_outputs is not None) + len(self._guided_kinds) > 1:
            raise field_error(
                "structured_outputs",
                "You can only use one kind of structured outputs constraint: response_format, structured_outputs "
                "or guided_*.",
            )
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise field_error(
                "guided_whitespace_pattern", "`guided_whitespace_pattern` can only be used with `guided_json`."
            )
        return self

"""POST /v2/embed: Cohere's embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.protocol.common import Int64, RequestBody, field_error
from quire.protocol.pooling.inputs import OnlyTexts

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedRequest(RequestBody):
    """Embed texts."""

    texts: OnlyTexts | None = None
    inputs: OnlyTexts | None = Field(None, description="objects with `content`, instead of texts")
    input_type: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="search_query, search_document, classification or clustering: the model's prompt for it"
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=6)] | None = None
    output_dimension: Annotated[int, Field(lt=1 << 31)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = Field(
        "END", description="side at which longer texts are truncated"
    )
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="truncate longer texts to this number of tokens"
    )
    priority: Int64 | None = 0

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise field_error("texts", "Exactly one of `texts` and `inputs` is required.")
        return self


class CohereEmbeddings(BaseModel):
    """Embeddings by type; only requested types are present."""

    model_config = ConfigDict(populate_by_name=True)

    floats: list[list[float]] | None = Field(None, alias="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(BaseModel):
    """The response body."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"

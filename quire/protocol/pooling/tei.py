"""Requests and responses of Text Embeddings Inference: /embed, /embed_all, /embed_sparse, /rerank, /predict, /info."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, RootModel, Tag

from quire.protocol.common import RequestBody
from quire.protocol.pooling.inputs import Inputs, OnlyText, OnlyTexts, Sequences
from quire.protocol.pooling.requests import RerankRequest


def _lowered(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Direction = Annotated[Literal["left", "right"], BeforeValidator(_lowered)]


class TeiFields(RequestBody):
    """Fields of all requests."""

    truncate: bool | None = Field(None, description="truncate inputs that are too long; default: refuse them")
    truncation_direction: Direction | None = Field(None, description="Left or Right")


class TeiTextFields(TeiFields):
    """Fields of requests with texts or token ids."""

    inputs: Inputs
    prompt_name: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="name of one of the model's prompts, which is prepended to each text"
    )


class TeiEmbedRequest(TeiTextFields):
    """Embed texts."""

    normalize: bool | None = True
    dimensions: Annotated[int, Field(lt=1 << 31)] | None = None
    encoding_format: Literal["float"] | None = None


class TeiEmbedAllRequest(TeiTextFields):
    """Embed each token of texts."""


class TeiEmbedSparseRequest(TeiTextFields):
    """Embed texts sparsely."""


class TeiPredictRequest(TeiFields):
    """Classify a text, a pair of texts, or several of either."""

    inputs: Sequences
    raw_scores: bool = False


class TeiRerankRequest(TeiFields):
    """Order texts by their relevance to a query."""

    query: OnlyText
    texts: OnlyTexts
    raw_scores: bool = False
    return_text: bool = False


class TeiRank(BaseModel):
    """A text and its score."""

    index: int
    score: float | None
    text: str | None = None


class TeiRanks(RootModel[list[TeiRank]]):
    """The texts in descending order of their scores."""


class TeiLabel(BaseModel):
    """A label and its score."""

    score: float | None
    label: str


class TeiLabels(RootModel[list[TeiLabel] | list[list[TeiLabel]]]):
    """The labels in descending order of their scores."""


class TeiVectors(RootModel[list[list[float]]]):
    """An embedding for each input."""


class TeiTokenVectors(RootModel[list[list[list[float]]]]):
    """Embeddings of the tokens of each input."""


class TeiSparseValue(BaseModel):
    """A value of a sparse embedding that is not 0."""

    index: int
    value: float


class TeiSparseVectors(RootModel[list[list[TeiSparseValue]]]):
    """A sparse embedding for each input."""


class TeiInfo(BaseModel):
    """The model and its limits."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int | None
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


_TEI, _JINA = "texts of TEI", "documents of Jina"  # discriminator tags


def _kind(body: Any) -> str:
    return _TEI if isinstance(body, dict) and "texts" in body and "documents" not in body else _JINA


AnyRerankRequest = Annotated[
    Annotated[TeiRerankRequest, Tag(_TEI)] | Annotated[RerankRequest, Tag(_JINA)], Discriminator(_kind)
]

"""POST /inference/v1/generate, from tokens to tokens, and the render endpoints, which make its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, Field, model_validator

from quire.protocol.chat import ChatLogprobs, ChatRequest
from quire.protocol.common import FinishReason, Int64, PromptLogprobs, RequestBody, Usage, field_error, preencoded
from quire.protocol.completions import CompletionRequest
from quire.protocol.kv_transfer import KVTransferParams
from quire.protocol.sampling import (
    Alternatives,
    ChatAndCompletionFields,
    MinP,
    RepetitionPenalty,
    StreamOptions,
    Temperature,
    TopK,
    TopP,
)
from quire.protocol.structured import StructuredOutputs
from quire.protocol.token_ids import TokenIds

_Row = Annotated[list[Annotated[int, Field(ge=-1, lt=1 << 31)]], Field(fail_fast=True)]


class GenerateSamplingParams(ChatAndCompletionFields):
    """vLLM's SamplingParams with its defaults; those of the model's files are not used."""

    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="default: as many as fit into the context, or the model's max_new_tokens"
    )
    temperature: Temperature | None = 1.0
    top_p: TopP | None = 1.0
    top_k: TopK | None = 0
    min_p: MinP | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    logprobs: Alternatives | None = None
    prompt_logprob_token_ids: list[_Row] | None = Field(
        None,
        min_length=1,
        description="tokens whose log-probabilities are returned at each position of the prompt; -1: none",
    )
    prompt_logprob_start: Annotated[int, Field(ge=0)] | None = Field(
        None, description="first row of `prompt_logprob_token_ids`: it is about the prompt's token after this one"
    )
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool = Field(True, description="no effect, except that `stop` requires true")


class TokensRequest(RequestBody):
    """Continue a prompt of tokens."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateSamplingParams
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int64 = 0
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = Field(None, description="return the prompt's token ids")
    kv_transfer_params: KVTransferParams | None = Field(None, description="as in completions")
    features: Any = Field(None, description="must be null: media are accepted in chats only")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.features is not None:
            raise field_error("features", "`features` is not supported: send the media in a chat.")
        if self.output_mode == "text" and not self.sampling_params.detokenize:
            raise field_error("output_mode", "`output_mode` text requires `detokenize: true`.")
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "Stream options can only be defined when `stream=True`.")
        return self


class TokenLogprob(BaseModel):
    """A token by its id."""

    token_id: int
    logprob: float
    rank: int | None = Field(description="position among all tokens by probability, from 1; null for listed tokens")


class TokenLogprobEntry(TokenLogprob):
    """A token of the answer, with itself and its alternatives."""

    top_logprobs: list[TokenLogprob]


class TokenLogprobsList(BaseModel):
    """Log-probabilities of a choice's tokens, by their ids."""

    content: Annotated[orjson.Fragment, preencoded(list[TokenLogprobEntry])]


class TokensChoice(BaseModel):
    """One answer, or a piece of it. `text` is set in output mode `text`, and `logprobs` has texts there."""

    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: TokenLogprobsList | ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class TokensResponse(BaseModel):
    """The response body."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = Field(
        None, description="a base64-encoded .npy file: float32 of the shape of `prompt_logprob_token_ids`"
    )
    prompt_token_ids: list[int] | None = None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None


class MediaPlace(BaseModel):
    """The tokens of an item in a prompt."""

    offset: int
    length: int


class MediaFeatures(BaseModel):
    """The media of a rendered prompt, by their kinds; a picture or video may be several items."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[MediaPlace]]


class _Rendering(BaseModel):
    """What a request for a rendered prompt has beside the fields of its API."""

    return_token_offsets: bool | None = Field(None, description="return `token_offsets`")


class ChatRendering(ChatRequest, _Rendering):
    """A conversation that is rendered."""


class CompletionRendering(CompletionRequest, _Rendering):
    """Prompts of completions that are tokenized."""


class RenderedPrompt(BaseModel):
    """A rendered prompt: without `features` a request for /inference/v1/generate, and the text of the prompt."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    token_offsets: list[tuple[int, int]] | None = Field(
        None,
        description="with `return_token_offsets`, where the characters of each token begin and end in `prompt`; null: "
        "the prompt has media, or was token ids, or its tokens are not those of its text",
    )
    features: MediaFeatures | None = Field(None, description="its media; null: it has none")
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int

"""POST /v1/audio/transcriptions, /v1/audio/translations and /v1/audio/languages: fields of forms, and answers."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from quire.engine.client.sampling_params import NUMBERS
from quire.protocol.common import Int64, ListOf, RequestBody, StrictModel, field_error
from quire.protocol.sampling import NumberFields, Penalty, differs_from_greedy

Milliseconds = Annotated[int, Field(ge=0, le=60_000)]
Format = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]
_MAX_LISTED = 128
_LANGUAGE = Annotated[str, Field(max_length=16)]
Languages = Annotated[ListOf[_LANGUAGE], Field(max_length=_MAX_LISTED)]
Timeout = Annotated[float, Field(ge=0.001, le=1e7)]


class VoiceDetection(StrictModel):
    """Cut by voice activity."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="probability that counts as speech")
    prefix_padding_ms: Milliseconds = Field(300, description="audio before speech that is kept")
    silence_duration_ms: Milliseconds = Field(500, description="silence that ends speech; OpenAI: 200")


class SpeechToTextRequest(NumberFields, RequestBody):
    """Fields that both endpoints have, beside `file`. Those at the end are accepted with their defaults only."""

    prompt: str = Field("", description="earlier text, as context for vocabulary and style")
    hotwords: str | None = Field(None, description="words that are likely to occur")
    response_format: Format = "json"
    stream: bool | None = Field(False, description="answer with server-sent events")
    stream_format: Literal["openai", "vllm"] | None = Field(
        None, description="events of the stream; default: --transcription-events"
    )
    stream_include_usage: bool | None = Field(False, description="with stream_format vllm: end with a usage chunk")
    stream_continuous_usage_stats: bool | None = Field(
        False, description="with stream_format vllm: usage in every chunk"
    )
    chunking_strategy: Literal["auto"] | VoiceDetection | None = Field(
        None, description="auto or server_vad: skip silence, and split the audio at pauses"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        0.0, description="0: greedy, with higher temperatures as fallback where the text repeats itself or is unlikely"
    )
    seed: Int64 | None = None
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="maximum number of tokens for each window of audio"
    )
    use_beam_search: bool = Field(False, description="search for the most likely text, with `n` beams")
    n: Annotated[int, Field(ge=1)] = Field(1, description="number of beams; requires `use_beam_search`")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = Field(
        1.0, description="texts are ranked by their log-probability divided by their length to this power"
    )
    timeout: Timeout | None = None
    language: _LANGUAGE | None = Field(None, description="ISO 639-1 code of the spoken language; default: detected")
    to_language: _LANGUAGE | None = Field(
        None, description="language of the text; must be the one that the endpoint produces without it"
    )
    include_stop_str_in_output: bool = False
    vllm_xargs: str | None = None
    watermarking: bool | None = False

    @model_validator(mode="after")
    def _streaming(self) -> Self:
        if self.stream and self.response_format not in ("json", "text"):
            raise field_error(
                "response_format", f"{self.response_format} cannot be streamed; a stream has the format json or text."
            )
        return self

    @model_validator(mode="after")
    def _beams(self) -> Self:
        if not self.use_beam_search:
            if self.n > 1:
                raise field_error("n", "`n` requires `use_beam_search`: it is the number of beams.")
            if self.length_penalty != 1:
                raise field_error("length_penalty", "`length_penalty` requires `use_beam_search`.")
            return self
        if self.stream:
            raise field_error("use_beam_search", "`use_beam_search` is not available when `stream=True`.")
        if self.response_format not in ("json", "text"):
            raise field_error(
                "response_format",
                f"The format {self.response_format} cannot be combined with `use_beam_search`, whose beams have no "
                "timestamps. Formats with beam search: json, text.",
            )
        for name in NUMBERS:
            if differs_from_greedy(self, name):
                raise field_error(name, f"`{name}` cannot be combined with `use_beam_search`.")
        return self


class TranscriptionRequest(SpeechToTextRequest):
    """The form of /v1/audio/transcriptions."""

    timestamp_granularities: Annotated[ListOf[Literal["word", "segment"]], Field(max_length=8)] = Field(
        [], description="with verbose_json: segment, word or both; default: segment"
    )
    include: Annotated[ListOf[Literal["logprobs"]], Field(max_length=8)] = Field([], description="with json")
    languages: Languages = Field([], description="codes of the languages that may be spoken")
    keywords: Annotated[ListOf[Annotated[str, Field(max_length=256)]], Field(max_length=_MAX_LISTED)] = Field(
        [], description="as hotwords"
    )
    delay: str | None = None
    known_speaker_names: ListOf[str] | None = None
    known_speaker_references: ListOf[str] | None = None

    @model_validator(mode="after")
    def _formats(self) -> Self:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise field_error("timestamp_granularities", "timestamp_granularities require the format verbose_json.")
        if self.include and self.response_format != "json":
            raise field_error("include", "logprobs require the format json.")
        return self


class TranslationRequest(SpeechToTextRequest):
    """The form of /v1/audio/translations."""


class LanguageRequest(RequestBody):
    """The form of /v1/audio/languages."""

    languages: Languages = Field([], description="codes of the languages that may be spoken; default: all")
    timeout: Timeout | None = None


class LanguageProbability(BaseModel):
    """A language and its probability."""

    code: str
    probability: float


class DetectedLanguage(BaseModel):
    """The answer of /v1/audio/languages: the most likely language, and all in the order of their probabilities."""

    language: str
    probability: float
    languages: list[LanguageProbability]


class InputTokenDetails(BaseModel):
    """Input tokens by origin."""

    audio_tokens: int
    text_tokens: int


class TranscriptionUsageBody(BaseModel):
    """Seconds and tokens of a request. `type` selects one of OpenAI's two formats."""

    type: Literal["duration", "tokens"]
    seconds: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class TranscriptLogprob(BaseModel):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class Transcription(BaseModel):
    """The answer in the format json."""

    text: str
    usage: TranscriptionUsageBody
    languages: list[dict[str, str]] | None = None
    logprobs: list[TranscriptLogprob] | None = None


class TranscriptSegment(BaseModel):
    """A part of the text with its times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(BaseModel):
    """A word with its times in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(BaseModel):
    """The answer in the format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None
    usage: TranscriptionUsageBody


@cache  # each app asks for it, which takes 2 ms a form
def form_schema(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a form with these fields and a file."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file"]
    for name, inner in definitions.items():
        _inline(schema, f"#/components/schemas/{name}", inner)
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _inline(node: Any, reference: str, schema: dict[str, Any]) -> None:
    """Replace references to a schema by the schema."""
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _inline(value, reference, schema)
    if isinstance(node, dict) and node.get("$ref") == reference:
        node.pop("$ref")
        node.update(schema)

"""All messages between the front end and an engine core.

Arrays are sent as raw ZMQ frames behind the msgpack-encoded message (see `transport`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.wire.audio import AudioInfo
from quire.engine.wire.convolutions import Convolution, count_columns, count_positions
from quire.engine.wire.streaming import LiveModelInfo
from quire.engine.wire.token_mask import TokenMask, has_other_token

TokenArray = NDArray[np.int32]
PooledArray = NDArray[np.float32]
FeatureArray = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "error"]
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify", "align", "ctc"]
PoolingKind = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean"]


class TimestampRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens may follow in a transcription with timestamps: these come in pairs and never go back.

    A timestamp is also chosen whenever all timestamps together are likelier than any other token (Radford et al. 2022).

    Attributes:
        begin: token of the timestamp 0.00; all tokens from it on are timestamps.
        no_timestamps: the token that turns timestamps off; it is never sampled.
        end: the end token.
        max_initial: the first timestamp is at most `begin + max_initial`; None: any.
    """

    begin: int
    no_timestamps: int
    end: int
    max_initial: int | None = None


class TokenProbs(msgspec.Struct, frozen=True):
    """Asks for the probabilities that the model gives these tokens after a position of the prompt.

    At whisper's start token, these are the probabilities of no speech and of each language. They are those of all
    logits, before any sampling parameter.
    """

    position: int
    token_ids: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Parameters of a request that generates tokens. The API and `quire.engine.validation` check the values.

    Its size is bounded whatever a request has: each of the sequences of a request is sent with a copy.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # finish the sequence without a stop_reason
    stop_token_ids: frozenset[int] = frozenset()  # finish the sequence; the token is its stop_reason
    logit_bias: dict[int, float] = {}
    allowed_tokens: TokenMask | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be generated
    logprobs: int | None = None  # number of top tokens to report beside the sampled token
    prompt_logprobs: int | None = None
    grammar: str = ""  # constrains the output (see `quire.engine.wire.grammar`); empty: no constraint
    grammar_size: int = 0  # bytes that the compiled grammar takes; 0: not known
    begin_suppress_tokens: tuple[int, ...] = ()  # must not be the first token that is generated
    timestamp_rule: TimestampRule | None = None
    token_probs: TokenProbs | None = None  # reported with the first token

    def has_allowed_token(self, vocab_size: int) -> bool:
        """Whether at least one token is allowed at every position, judging by the parameters alone."""
        forbidden = {word[0] for word in self.bad_words if len(word) == 1} | {*self.begin_suppress_tokens}
        if self.min_tokens > 0:
            forbidden.update(self.eos_token_ids, self.stop_token_ids)
        if self.allowed_tokens is not None:
            return has_other_token(self.allowed_tokens, forbidden)
        return len(forbidden) < vocab_size


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pool"):
    """Parameters of a request that turns the last layer's hidden states of a prompt into one array of float32.

    Attributes:
        task: "embed" gives (size,), "token_embed" (tokens, size), "classify" (labels,), "token_classify"
            (tokens, labels), "score" (1,). "align" gives (tokens - skip_tokens, frames): how strongly each token of a
            transcription belongs to each frame of its audio. "ctc" gives (positions, 2): the most likely token at each
            encoded position, and its log-probability; the prompt is empty then.
        kind: how token hidden states are pooled, for tasks on whole texts; None for the
            model's own kind, which the core fills in.
        dimensions: number of values of an embedding to keep, the first ones.
        use_activation: normalize embeddings to length 1; apply softmax or sigmoid to labels and scores. None: as the
            model's files say.
        skip_tokens: number of tokens at the start that are not part of the mean or the alignment.
        frames: for "align": number of encoder positions that hold audio, the first ones; None: all.
    """

    task: PoolingTask
    kind: PoolingKind | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    skip_tokens: int = 0
    frames: int | None = None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens that the prefix cache holds must be computed all the same, for their hidden states."""
        return self.task.startswith("token_") or self.task == "align" or self.kind != "last"


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """An input beside the tokens.

    Attributes:
        hash: hash of everything that its encoding depends on; equal hashes mean equal items. Empty if the model reads
            audio while it generates (see `LiveModelInfo`): such audio is never shared.
        start, length: the tokens of the prompt that stand for it, whose embeddings are those of the item. Both are 0
            where the model only transcribes (see `SpeechToTextInfo`, `LiveModelInfo`): the item then has no tokens.
        features: (rows, columns) float32: a spectrogram, or samples in one row; see `SpeechToTextInfo.features`.
        encoded: number of columns (frames before the encoder) to encode; only convolutions read later ones. None: all.
        before: number of columns before them, of the audio that the item continues; only convolutions read them.
    """

    hash: bytes
    kind: Literal["audio"] = "audio"
    start: int = 0
    length: int = 0
    features: FeatureArray
    encoded: int | None = None
    before: int = 0

    @property
    def columns(self) -> int:
        """Number of columns of features (frames, before the encoder) that are encoded."""
        return self.features.shape[1] - self.before if self.encoded is None else self.encoded


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Run a request on `prompt`, 1-D int32 token ids; the type of `params` selects generation or pooling.

    Attributes:
        items: inputs beside the tokens, in the order of their spans, which do not overlap.
        open: more follows in `ExtendRequest` messages: of the prompt, and nothing is generated before its end; or of
            the audio, if the model reads it while it generates (see `LiveModelInfo`).
    """

    request_id: str
    prompt: TokenArray
    params: SamplingParams | PoolingParams
    priority: int = 0  # lower runs first, under the priority policy
    cache_salt: str | None = None  # only requests with equal salts share prefix blocks
    flow: str = ""  # fair-queueing key; flows get equal engine time
    segment_start: int | None = None  # index of the first token of the second text of a pair
    items: tuple[MediaItem, ...] = ()
    open: bool = False

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.params, SamplingParams)
        return self.params


class AddRequests(msgspec.Struct, frozen=True, tag="add_many"):
    """Several requests in one message. The core's channel gives them out one by one."""

    requests: list[AddRequest]


class ExtendRequest(msgspec.Struct, frozen=True, tag="extend"):
    """Append tokens to the prompt of an open request, or audio to its audio; ignored if there is none of that id.

    Attributes:
        tokens: 1-D int32 token ids; may be empty, and must be if the model reads audio while it generates.
        last: the prompt or the audio is complete.
        items: items whose spans are in these tokens; their `start` counts from the first of them.
    """

    request_id: str
    tokens: TokenArray
    last: bool = False
    items: tuple[MediaItem, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop these requests; nothing more is sent about them."""

    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Liveness probe; the core answers with `Pong`."""

    serial: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop the core."""


FrontMessage = AddRequest | ExtendRequest | Abort | Ping | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, then of the top tokens in descending order.

    The three lists have equal length; `ranks` count from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class TokensOutput(msgspec.Struct, array_like=True, tag="tokens"):
    """New tokens of one generating request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that finished the sequence
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token; None at the first position
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    scheduled_at: float = 0.0  # monotonic seconds
    token_probs: list[float] | None = None  # with the first token; see `SamplingParams.token_probs`


class PooledOutput(msgspec.Struct, array_like=True, tag="pooled"):
    """The result of a pooling request, which is then finished. `PoolingParams.task` decides the shape of `data`."""

    request_id: str
    data: PooledArray
    cached_tokens: int = 0
    scheduled_at: float = 0.0


class ErrorOutput(msgspec.Struct, array_like=True, tag="error"):
    """One request was refused or failed; other requests go on.

    Attributes:
        invalid: something is wrong with the request; else the engine failed.
    """

    request_id: str
    error: str
    invalid: bool = False


RequestOutput = TokensOutput | PooledOutput | ErrorOutput


class StepStats(msgspec.Struct, array_like=True):
    """Gauges of the engine after a step, and counters of this step alone."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    step_tokens: int = 0  # prompt tokens that were computed, and tokens that were generated
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    item_queries: int = 0  # items looked up in the encoder cache
    item_hits: int = 0  # those of them that were encoded before


class StepOutput(msgspec.Struct, tag="step"):
    """The outputs of all requests in one step."""

    outputs: Sequence[RequestOutput]
    stats: StepStats


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model that pools.

    Attributes:
        embedding_size: number of values of an "embed" result.
        token_embedding_size: number of values of each token's "token_embed" result.
        matryoshka: embeddings may be cut to fewer dimensions.
        dimensions: the dimensions that they may be cut to; empty: any.
        labels: names of the labels of "classify" and "token_classify", by index.
        score_method: how a query and a document are compared: by their embeddings, by running the model on both
            together, or by the embeddings of their tokens. None if they cannot be compared.
        sparse: embeddings have a value for each token of the vocabulary, most of them 0.
    """

    embedding_size: int
    token_embedding_size: int
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    score_method: Literal["cosine", "dot", "cross_encoder", "max_sim"] | None = None
    sparse: bool = False


class SpeechToTextInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model that only transcribes, for the front end. A request has one item.

    Attributes:
        kind: how text is made: "whisper" has prompts of special tokens, "moonshine" begins with the start token alone,
            a "ctc" model gives the token of each position.
        features: features of an item: whisper's log-mel spectrogram; one that is normalized over time; samples, or
            samples that are normalized to a mean of 0 and a variance of 1.
        sample_rate: sample rate of the audio that features are made from, in Hz.
        num_mel_bins, num_frames: most rows and columns of an item's features; samples are one row. Whisper's may have
            fewer columns, an even number of them, but most models have been trained with padded audio only.
        convolutions: steps from columns of features (before the encoder) to the encoder's positions.
        chunk_seconds: seconds of audio in one item.
        num_positions: positions after the encoder of one item, `time_precision` seconds each.
        max_output_tokens: maximum number of tokens of prompt and output together.
        languages: token of each ISO code; empty for models of one language.
        start_token: begins each prompt, after the earlier text if there is any; None for CTC, as `end_token`.
        transcribe_token, translate_token: None for models of one language.
        timestamp_begin: token of the timestamp 0.00; each further one is `time_precision` later. None: the model writes
            no timestamps.
        max_initial_timestamp: see `TimestampRule.max_initial`.
        no_speech_token: its probability at the start token is that of no speech.
        previous_token: begins the earlier text, which conditions the output.
        suppress_tokens: never to be sampled.
        begin_suppress_tokens: never to be sampled first.
        blank_token: the token of CTC that stands for no text.
        aligns_words: times of words are known: from the task "align", or from the positions of CTC.
    """

    kind: Literal["whisper", "moonshine", "ctc"]
    features: Literal["log_mel", "normalized_log_mel", "samples", "normalized_samples"] = "log_mel"
    sample_rate: int
    num_mel_bins: int
    num_frames: int
    convolutions: tuple[Convolution, ...] = (Convolution(3, 1, 1), Convolution(3, 2, 1))
    chunk_seconds: float
    num_positions: int
    max_output_tokens: int
    languages: dict[str, int] = {}
    start_token: int | None = None
    transcribe_token: int | None = None
    translate_token: int | None = None
    no_timestamps_token: int | None = None
    timestamp_begin: int | None = None
    max_initial_timestamp: int | None = None
    no_speech_token: int | None = None
    previous_token: int | None = None
    end_token: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    blank_token: int | None = None
    aligns_words: bool
    time_precision: float = 0.02

    def positions(self, columns: int) -> int:
        """The number of encoder positions of an item with `columns` columns of features."""
        return min(self.num_positions, count_positions(self.convolutions, columns))

    @property
    def min_columns(self) -> int:
        """The fewest columns of features that an item may have."""
        return count_columns(self.convolutions, 1)


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about a loaded model, for the front end.

    Attributes:
        tasks: "generate", "transcribe", or the pooling tasks that the model can do.
        pooling: None if it has no pooling tasks.
        speech: facts about a model that only transcribes; None for others.
        audio: None if its prompts cannot have audio among their tokens.
        streaming: facts about a model that transcribes audio while it arrives; None for others.
    """

    architecture: str
    implementation: Literal["quire", "transformers"]
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    num_blocks: int
    block_size: int
    weight_bytes: int
    cache_bytes: int
    tasks: tuple[str, ...] = ("generate",)
    pooling: PoolingInfo | None = None
    speech: SpeechToTextInfo | None = None
    audio: AudioInfo | None = None
    streaming: LiveModelInfo | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and requests are accepted."""

    info: ModelInfo


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`."""

    serial: int


class CoreDied(msgspec.Struct, frozen=True, tag="died"):
    """The core has ended; no further message follows."""

    error: str


CoreMessage = Ready | StepOutput | Pong | CoreDied

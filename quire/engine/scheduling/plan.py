"""Messages between scheduler and model runner. They are immutable for the receiver."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    AddRequest,
    AudioItem,
    FeatureArray,
    MediaItem,
    PooledArray,
    StepStats,
    TokenArray,
    TokenLogprobs,
)
from quire.engine.client.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CrossAttentionItem:
    """The encoded positions that all tokens of a sequence attend to.

    Attributes:
        blocks: blocks with the keys and values of the encoded positions.
        length: number of encoded positions.
        item: item to encode into `blocks` in this step; None if they hold it already, or another sequence encodes it.
    """

    blocks: tuple[int, ...]
    length: int
    item: AudioItem | None


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item with placeholder tokens that a step encodes. `key`: key of its embeddings."""

    key: bytes
    item: MediaItem


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """Audio that a step encodes, of a sequence whose audio arrives while it is computed.

    Attributes:
        first: index of the first frame (of transducers: column), which follows those encoded before.
        features: (rows, columns).
        last: no audio follows; only transducers need to know.
    """

    request_id: str
    first: int
    features: FeatureArray
    last: bool = False


@dataclass(frozen=True, slots=True)
class PlaceholderTokens:
    """Consecutive placeholder tokens of an item in a step.

    Attributes:
        key: key of the item's embeddings.
        start: position of the first token in the sequence.
        first: index of its embedding among those of the item.
        count: number of tokens.
    """

    key: bytes
    start: int
    first: int
    count: int


class BidirectionalSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a sequence that attend to each other in both directions. A step computes all of them, or
    those that are not cached.

    Attributes:
        ignores_windows: also to those before the window of a layer (PaliGemma).
    """

    start: int
    end: int
    ignores_windows: bool = False


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions of a prompt with pictures that have those of time, height and width (M-RoPE).

    Attributes:
        tokens: (3, length) int32, of the tokens of the prompt.
        following: of the token behind them, in all three rows.
    """

    tokens: TokenArray
    following: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence enters the batch, for the first time or again after preemption.

    Attributes:
        tokens: prompt and, after preemption, the output so far.
        prompt_logprobs: number of top tokens to report at the positions of the prompt; None to report nothing.
        uses_long_rope: compute it with a long rope's frequencies for sequences beyond the trained length.
        lora_id: adapter that it is computed with; None: none.
        positions: rotary positions of its prompt; None: those of its tokens in the sequence.
        snapshot: place of the saved states that it begins with; None: it begins with its first token.
    """

    request_id: str
    tokens: TokenArray
    prompt_len: int
    params: SamplingParams | PoolingParams
    prompt_logprobs: int | None
    uses_long_rope: bool = False
    cross_attention: CrossAttentionItem | None = None
    lora_id: int | None = None
    positions: RotaryPositions | None = None
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class PromptExtension:
    """Tokens that are appended to the prompt of a sequence in the batch.

    Attributes:
        positions: rotary positions of the whole prompt, see `NewSequence`.
    """

    request_id: str
    tokens: tuple[int, ...]
    positions: RotaryPositions | None = None


class ScheduledSequence(msgspec.Struct, frozen=True):
    """Compute tokens [start, start + count) of a sequence.

    Attributes:
        new_blocks: appended to the sequence's block tables before the step, those of the first group of layers first,
            as many to each. The step's tokens attend to none of those before the group's window, which may be any.
        samples: the step computes the sequence's last token, so the next one is sampled.
        draft: draft tokens, at the end of the range; each accepted draft token yields a further token.
        items: placeholder tokens.
        bidirectional: those of its tokens that attend to each other in both directions.
        snapshot: place where its states behind these tokens are saved; None: they are not.
    """

    request_id: str
    start: int
    count: int
    new_blocks: tuple[int, ...]
    samples: bool
    draft: tuple[int, ...] = ()
    items: tuple[PlaceholderTokens, ...] = ()
    bidirectional: tuple[BidirectionalSpan, ...] = ()
    snapshot: int | None = None


@dataclass(slots=True)
class StepPlan:
    """One step: sequences that leave the batch, sequences that enter it, and the tokens to compute.

    Attributes:
        prompt_extensions: sequences in the batch whose prompts have become longer.
        encoder_requests: the requests of an encoder's step, each computed in full.
        encoded: items that are encoded before the tokens are computed.
        audio: audio that is encoded before tokens are computed, of sequences whose audio arrives while they run.
        evicted: keys of embeddings that are not kept any more, from before the step on.
        further_steps: most steps that may follow at once, each with the last token of every scheduled sequence; their
            blocks have room for the tokens. They end early where a sequence may have ended.
        stats: counters of this step; the scheduler completes them when the step has finished.
    """

    removed: list[str] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    prompt_extensions: list[PromptExtension] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    encoder_requests: list[AddRequest] = field(default_factory=list)
    encoded: list[EncodedItem] = field(default_factory=list)
    audio: list[EncodedAudio] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    further_steps: int = 0
    stats: StepStats = field(default_factory=StepStats)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(item.count for item in self.scheduled)

    @property
    def encoded_blocks(self) -> dict[str, tuple[int, ...]]:
        """By request id, the blocks that this step fills with keys and values for cross-attention."""
        entered = [(new.request_id, new.cross_attention) for new in self.new]
        return {name: entry.blocks for name, entry in entered if entry is not None and entry.item is not None}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, not even a row to free or to fill."""
        work = (self.removed, self.new, self.prompt_extensions, self.scheduled, self.audio, self.encoder_requests)
        return not any(work)


class SampledTokens(msgspec.Struct, frozen=True):
    """The next tokens of one sequence: one, and one more for each confirmed token of its draft or further step."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class SequenceError:
    """Why a sequence cannot continue.

    Attributes:
        invalid: something is wrong with the request; else the engine failed.
        corrupted: the model has computed NaN for the sequence, which its cached blocks may hold.
    """

    message: str
    invalid: bool = False
    corrupted: bool = False


NOT_FINITE = SequenceError(
    "the model computed a value that is not a finite number (NaN or infinity) for this request", corrupted=True
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        prompt_logprobs: log-probabilities by request id, of the prompt positions that follow the tokens of this step.
        token_probs: probabilities by request id, see `SamplingParams.token_probs`.
        pooled: arrays by request id, of pooling requests whose last token was computed.
        errors: errors by request id. The other sequences are not affected.
        not_encoded: keys of items whose encoding failed.
        lost: ids of sequences of a step that failed and may have changed their states: they are to be computed again.
    """

    sampled: list[SampledTokens] = field(default_factory=list)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    token_probs: dict[str, list[float]] = field(default_factory=dict)
    pooled: dict[str, PooledArray] = field(default_factory=dict)
    errors: dict[str, SequenceError] = field(default_factory=dict)
    not_encoded: list[bytes] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

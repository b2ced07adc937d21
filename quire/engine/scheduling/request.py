"""Request: the scheduler's state of one sequence."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    AudioItem,
    FinishReason,
    LoadSource,
    MediaItem,
    PictureItem,
    TokenArray,
    TokenLogprobs,
    TokensOutput,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.drafter import Drafter
from quire.engine.scheduling.items import PlaceholderRanges
from quire.engine.scheduling.limits import Bidirectional
from quire.engine.scheduling.plan import (
    BidirectionalSpan,
    CrossAttentionItem,
    NewSequence,
    RotaryPositions,
    SampledTokens,
)

BlockHash = bytes
Hasher = Callable[[bytes], BlockHash]
ExtraKey = str | tuple[str, int]  # an item is its hash, and its start counted from that of the block


def token_array(tokens: TokenArray) -> array[int]:
    """Return token ids as int32 that others can be appended to. It is copied from and to NumPy without making ints."""
    return array("i", tokens.astype(np.int32, copy=False).tobytes())


@dataclass(slots=True, eq=False)
class CrossAttentionState:
    """The encoded positions of an item.

    Attributes:
        length: positions.
        hashes: content hashes of the blocks; empty without a prefix cache.
        blocks: the block table; empty while the request is not in the batch.
    """

    item: AudioItem
    length: int
    hashes: list[BlockHash]
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. It never leaves the core.

    A step that was submitted and has not finished is in flight. With an executor that allows more than one step in
    flight, a sequence is scheduled on before its sampled tokens are known: `num_output_placeholders` counts them.

    Attributes:
        tokens: prompt and output so far; see `token_array`.
        sort_key: (priority, virtual finish time, arrival number), fixed at arrival. It orders the waiting queue and the
            batch; the largest is preempted first.
        start: virtual time at which the request starts under fair queueing, see `FairClock`.
        num_computed_tokens: tokens whose keys and values are in its blocks once the steps in flight have finished.
        num_output_placeholders: number of tokens that steps in flight will append to `tokens`.
        steps_in_flight: submitted steps that hold this sequence and have not finished.
        awaits_tokens: it is not scheduled on before the tokens of a step in flight are known: the step verifies a
            draft, so that their number is unknown, or the device does not keep sampled tokens.
        tables: the block table of each group of layers, see `BlockTables`; like the other blocks empty while it is not
            in the batch.
        unseen: of each group, how many of the first blocks were given back, as no further token attends to them.
        num_blocks: blocks of each table.
        in_batch: it is in the batch, and may hold blocks.
        root_hash: seed of the block hashes, from what vLLM calls extra keys (cache salt, LoRA, an item for
            cross-attention) and from the RoPE variant; only sequences with equal ones share blocks.
        uses_long_rope: computed with the frequencies of a long rope for sequences beyond the trained length.
        lora_id: adapter that it is computed with; None: none.
        first_keys: the extra keys of its first block that its root hash depends on, beside the adapter.
        adapter_key: extra key of the adapter; None: there is none.
        is_shared: other requests can find its blocks, see `leave_prefix_cache`.
        hashes: content hashes of the full blocks of `tokens`, as far as they were computed.
        num_cached_blocks: number of its blocks that are registered in the prefix cache (vLLM: num_cached_block).
        drafter: proposes speculative tokens; None without speculation.
        cached_tokens: prompt tokens found in the prefix cache when the sequence first entered the batch; None before.
        found_in_memory: part of those that were there before the rest was loaded from a tier; None: nothing was.
        loaded_tokens: part of `cached_tokens` that was loaded from a tier.
        loaded_from: the tier, or the slower of two.
        was_loaded: blocks were loaded for it since it last left the batch, and it does not wait for others.
        generates: whether tokens are sampled once all known tokens are computed.
        wants_prompt_logprobs: positions of the prompt must still be computed for their log-probabilities.
        token_probs: the result for `SamplingParams.token_probs`, until it is sent.
        cross_attention: encoded positions that all of its tokens attend to; None for most models.
        placeholders: its items that have placeholder tokens; None if there are none.
        computed_on_entry: its `num_computed_tokens` (prefix cache hits) when it last entered the batch.
        preemptions: how often it was preempted because KV blocks ran out.
        prefill_chunks: steps that have computed tokens of its prompt.
        draft_tokens, accepted_tokens: of its drafts that were verified.
        avoids_cache: it computes all of its tokens: blocks that it found in the prefix cache may have held NaN.
        alone_until: position up to which it is computed in steps of its own, see `Isolation`.
        steps_to_discard: steps in flight whose results do not count, as it is computed again.
        held_back: tokens at the end that are not computed yet: 1 while more of the prompt may follow, or the picture at
            the end that is computed as a whole; else 0.
        bidirectional: see `SchedulerLimits`.
        flow: see `RequestFields`.
        is_held: its blocks are kept for a decoder when it ends.
        remote: blocks of its prompt in another engine, which are not read yet; None: there are none.
        message_ends, next_turn: see `RequestFields`.
        awaited: hash of the block behind which another request in the batch was to save its states when this one had to
            wait for them; None: it has not waited since it last left the batch.
    """

    id: str
    tokens: array[int]
    params: SamplingParams | PoolingParams
    sort_key: tuple[int, ...]
    root_hash: BlockHash = b""
    uses_long_rope: bool = False
    lora_id: int | None = None
    first_keys: list[str] = field(default_factory=list)
    adapter_key: str | None = None
    is_shared: bool = True
    prompt_len: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    steps_in_flight: int = 0
    awaits_tokens: bool = False
    tables: list[list[int]] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    num_blocks: int = 0
    in_batch: bool = False
    hashes: list[BlockHash] = field(default_factory=list)
    num_cached_blocks: int = 0
    drafter: Drafter | None = None
    cached_tokens: int | None = None
    found_in_memory: int | None = None
    loaded_tokens: int = 0
    loaded_from: LoadSource = "disk"
    was_loaded: bool = False
    scheduled_at: float = 0.0
    start: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    token_probs: list[float] | None = None
    cross_attention: CrossAttentionState | None = None
    placeholders: PlaceholderRanges | None = None
    computed_on_entry: int = 0
    preemptions: int = 0
    prefill_chunks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    avoids_cache: bool = False
    alone_until: int = 0
    steps_to_discard: int = 0
    held_back: int = 0
    bidirectional: Bidirectional | None = None
    flow: str = ""
    is_held: bool = False
    remote: RemoteBlocks | None = None
    message_ends: list[int] | None = None
    next_turn: int = 0
    awaited: BlockHash | None = None
    generates: bool = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.generates = isinstance(self.params, SamplingParams)
        self.wants_prompt_logprobs = isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.params, SamplingParams)
        return self.params

    def num_new_tokens(self, max_model_len: int, rope_switch: int | None = None) -> int:
        """Tokens that can be scheduled now."""
        if self.num_output_placeholders and (self.awaits_tokens or self._ends_with_placeholders(max_model_len)):
            return 0
        longest = len(self.tokens) - self.held_back + self.num_output_placeholders
        return (
            longest if rope_switch is None or self.uses_long_rope else min(longest, rope_switch)
        ) - self.num_computed_tokens

    def _ends_with_placeholders(self, max_model_len: int) -> bool:
        """Whether the tokens in flight are the last ones that the request may have."""
        return len(self.tokens) + self.num_output_placeholders >= min(
            self.prompt_len + self.sampling_params.max_tokens, max_model_len
        )

    def max_draft(self, max_model_len: int, rope_switch: int | None = None) -> int:
        """Longest draft: the token sampled after it must still be allowed, and its own tokens not need another rope."""
        allowed = min(self.prompt_len + self.sampling_params.max_tokens, max_model_len) - 1
        if rope_switch is not None and not self.uses_long_rope:
            allowed = min(allowed, rope_switch)
        return max(0, allowed - len(self.tokens))

    def choose_rope(self, rope_switch: int, hasher: Hasher | None) -> None:
        """Compute all tokens with a long rope's other frequencies if there are more than `rope_switch`.

        The keys then differ from those of a shorter sequence that begins alike, so blocks are not shared with it.
        """
        if len(self.tokens) > rope_switch and not self.uses_long_rope:
            self.uses_long_rope = True
            self.root_hash = hasher(self.root_hash + b"extended") if hasher else b""
            self.first_keys.append("long rope")
            self.hashes = []

    def use_lora(self, lora_id: int, digest: bytes, hasher: Hasher | None) -> None:
        """Compute all tokens with an adapter. Keys and values are others then, as with another rope.

        `digest`: of the adapter's content, as its id may be that of another adapter in another process.
        """
        self.lora_id = lora_id
        self.root_hash = hasher(self.root_hash + b"lora" + digest) if hasher else b""
        self.adapter_key = digest.hex()
        self.hashes = []

    def leave_prefix_cache(self, hasher: Hasher) -> None:
        """Let other requests find none of its blocks from now on: they do not know its root hash."""
        self.root_hash = hasher(self.root_hash + b"reset")
        self.is_shared = False
        self.hashes = []

    def extend(self, tokens: list[int], *, last: bool, items: tuple[MediaItem, ...] = ()) -> None:
        """Append tokens and their items to the prompt."""
        if items:
            assert self.placeholders is not None
            self.placeholders.extend(items, len(self.tokens))
        self.tokens.extend(tokens)
        self.prompt_len = len(self.tokens)
        self.hold_back(is_open=not last)

    def hold_back(self, *, is_open: bool) -> None:
        """Set the number of tokens that are not computed yet. `is_open`: more of the prompt may follow."""
        self.held_back = 0
        if is_open:
            span = self._span_at(len(self.tokens) - 1)
            self.held_back = 1 if span is None else len(self.tokens) - span.start

    @property
    def decodes(self) -> bool:
        """Whether all of its prompt is scheduled, or computed."""
        return self.num_computed_tokens >= self.prompt_len

    @property
    def is_idle(self) -> bool:
        """Whether it waits for more of its prompt."""
        return self.held_back > 0 and self.num_computed_tokens >= len(self.tokens) - self.held_back

    @property
    def max_cached_tokens(self) -> int:
        """Tokens at the beginning that need not be computed if their keys and values are cached."""
        if not self.reads_prefix_cache:
            return 0
        probs = self.params.token_probs if isinstance(self.params, SamplingParams) else None
        return len(self.tokens) - 1 if probs is None else min(len(self.tokens) - 1, probs.position)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether tokens found in the prefix cache need not be computed."""
        if self.avoids_cache:
            return False
        if isinstance(self.params, PoolingParams):
            return not self.params.needs_all_tokens
        return not self.wants_prompt_logprobs

    def block_hashes(self, block_size: int, hasher: Hasher) -> list[BlockHash]:
        """Chained hashes of all full blocks. Equal hashes mean equal tokens, items and root hashes up to their ends."""
        for index in range(len(self.hashes), len(self.tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else self.root_hash
            start, end = index * block_size, (index + 1) * block_size
            content = self.tokens[start:end].tobytes()
            if self.placeholders is not None:
                content += self.placeholders.content(start, end)
            self.hashes.append(hasher(parent + content))
        return self.hashes

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What the keys and values of a block of tokens [start, end) depend on beside the tokens up to its end."""
        keys: list[ExtraKey] = [] if self.adapter_key is None else [self.adapter_key]
        if self.placeholders is not None:
            keys += self.placeholders.extra_keys(start, end)
        return (*keys, *self.first_keys) if start == 0 else tuple(keys)

    def to_new_sequence(self, cross: CrossAttentionItem | None, snapshot: int | None = None) -> NewSequence:
        """The request as it enters the batch. `snapshot`: see `NewSequence`."""
        prompt_logprobs = self.sampling_params.prompt_logprobs if self.wants_prompt_logprobs else None
        return NewSequence(
            self.id,
            np.array(self.tokens),
            self.prompt_len,
            self.params,
            prompt_logprobs,
            self.uses_long_rope,
            cross,
            self.lora_id,
            self.rotary_positions(),
            snapshot,
        )

    def rotary_positions(self) -> RotaryPositions | None:
        """The rotary positions of the prompt, where pictures in it have those of time, height and width."""
        return None if self.placeholders is None else self.placeholders.rotary_positions(self.prompt_len)

    def restart(self) -> None:
        """Discard what steps in flight compute."""
        self.steps_to_discard = self.steps_in_flight
        self.num_output_placeholders, self.awaits_tokens, self.cached_tokens = 0, False, 0

    def bind_to_prompt(self, hasher: Hasher | None) -> None:
        """Share blocks only with requests that have the same prompt, as keys of each token depend on all of it."""
        items = b"" if self.placeholders is None else self.placeholders.content(0, self.prompt_len)
        prompt = self.tokens[: self.prompt_len].tobytes()
        if hasher is not None:
            self.root_hash = hasher(self.root_hash + b"prompt" + prompt + items)
            self.first_keys.append(f"prompt {hasher(prompt + items).hex()}")

    def mark_scheduled(self) -> None:
        """Record when the sequence first entered the batch."""
        self.scheduled_at = self.scheduled_at or time.monotonic()

    def within_prompt(self, computed: int, count: int) -> int:
        """As many of `count` tokens as belong to the prompt, if the next one does; see `Span.generated`."""
        return min(count, self.prompt_len - computed) if computed < self.prompt_len else count

    def _span_at(self, position: int) -> BidirectionalSpan | None:
        """The tokens with which the one at a position attends in both directions; None if it does with none."""
        if self.bidirectional is None or not 0 <= position < self.prompt_len:
            return None
        if self.bidirectional == "prompt":
            return BidirectionalSpan(0, self.prompt_len, ignores_windows=True)
        return next(iter(self._pictures(position, position + 1)), None)

    def whole_spans(self, start: int, count: int) -> int:
        """As many of `count` tokens from `start` on as cut no tokens in two that attend in both directions."""
        end = start + count
        span = self._span_at(end - 1)
        return count if span is None or span.end <= end else max(0, span.start - start)

    def bidirectional_spans(self, start: int, end: int) -> tuple[BidirectionalSpan, ...]:
        """The tokens among [start, end) that attend in both directions, of which the first ones may precede `start`."""
        if self.bidirectional is None or start >= self.prompt_len:
            return ()
        if self.bidirectional == "prompt":
            return (BidirectionalSpan(0, self.prompt_len, ignores_windows=True),)
        return tuple(self._pictures(start, end))

    def _pictures(self, start: int, end: int) -> list[BidirectionalSpan]:
        """The pictures that have tokens in [start, end)."""
        items = () if self.placeholders is None else self.placeholders.within(start, end)
        return [
            BidirectionalSpan(item.start, item.start + item.length) for item in items if isinstance(item, PictureItem)
        ]

    def first_seen(self, start: int, window: int) -> int:
        """The first position that tokens from `start` on attend to, in layers with a window."""
        if self.bidirectional == "prompt" and start < self.prompt_len:
            return 0
        return max(0, start - window + 1)

    def take_sampled(self, sampled: SampledTokens, max_model_len: int) -> TokensOutput:
        """Append the tokens that a step has sampled, up to the one that finishes the request; returns its output."""
        self.num_output_placeholders -= 1
        self.awaits_tokens = False
        taken = 0
        finish_reason, stop_reason = None, None
        while taken < len(sampled.tokens) and finish_reason is None:
            finish_reason, stop_reason = self.append(sampled.tokens[taken], max_model_len)
            taken += 1
        if self.in_batch:  # else preempted while the step was in flight
            self.num_computed_tokens += taken - 1  # confirmed tokens of the draft
        output = TokensOutput(
            self.id,
            sampled.tokens[:taken],
            finish_reason,
            stop_reason,
            logprobs=None if sampled.logprobs is None else sampled.logprobs[:taken],
            cached_tokens=self.cached_tokens or 0,
            scheduled_at=self.scheduled_at,
            token_probs=self.token_probs,
            preemptions=self.preemptions,
            prefill_chunks=self.prefill_chunks,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            loaded_tokens=self.loaded_tokens,
        )
        self.token_probs = None
        if self.wants_prompt_logprobs:
            output.prompt_logprobs, self.wants_prompt_logprobs = self.prompt_logprobs, False
        return output

    def append(self, token: int, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Append a sampled token; returns the finish reason, if any, and the stop token that caused it."""
        self.tokens.append(token)
        params, generated = self.sampling_params, len(self.tokens) - self.prompt_len
        # A grammar may allow nothing but an end token before min_tokens.
        if generated >= params.min_tokens or params.grammar:
            if token in params.eos_token_ids:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if generated >= params.max_tokens or len(self.tokens) >= max_model_len:
            return "length", None
        return None, None

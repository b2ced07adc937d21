"""Request: the only mutable truth about a sequence. It never leaves the core."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.scheduling.drafter import Drafter
from quire.engine.wire.protocol import FinishReason, SamplingParams, TokenLogprobs

BlockHash = bytes
Hasher = Callable[[bytes], BlockHash]


@dataclass(slots=True, eq=False)
class Request:
    """A sequence being generated.

    Attributes:
        tokens: prompt and output so far.
        order: where it stands in the line; smaller goes first.
        computed: how many of `tokens` have their keys and values in `blocks`. Each step makes it catch up.
        blocks: the block table.
        root: hash that the first block's is chained to; equal roots may share blocks.
        hashes: content hashes of the full blocks of `tokens`, as far as they were asked for.
        published: blocks that others can find.
        drafter: guesses what comes next; none without speculation.
        cached_tokens: prompt tokens that the prefix cache held at first admission; none before that.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    order: tuple[int, int]
    root: BlockHash = b""
    prompt_len: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    published: int = 0
    drafter: Drafter | None = None
    cached_tokens: int | None = None
    scheduled_at: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_reported: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that wait to be computed."""
        return len(self.tokens) - self.computed

    def room_for_draft(self, max_model_len: int) -> int:
        """Tokens that a draft may have: behind them one more must be allowed to come."""
        allowed = min(self.prompt_len + self.params.max_tokens, max_model_len)
        return max(0, allowed - len(self.tokens) - 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether positions of the prompt still have to be computed for their log-probabilities."""
        return self.params.prompt_logprobs is not None and not self.prompt_reported

    def block_hashes(self, block_size: int, hasher: Hasher) -> list[BlockHash]:
        """Chained hashes of all full blocks: equal hashes mean equal tokens from the start on, and equal roots."""
        for index in range(len(self.hashes), len(self.tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else self.root
            content = array("i", self.tokens[index * block_size : (index + 1) * block_size])
            self.hashes.append(hasher(parent + content.tobytes()))
        return self.hashes

    def mark_scheduled(self) -> None:
        """Note when it first got into the batch."""
        self.scheduled_at = self.scheduled_at or time.monotonic()

    def append(self, token: int, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Add a sampled token; say whether it ends the sequence, and by which stop token."""
        self.tokens.append(token)
        generated = len(self.tokens) - self.prompt_len
        # Before min_tokens there is an end only where a grammar leaves nothing else.
        if generated >= self.params.min_tokens or self.params.grammar:
            if token in self.params.eos_token_ids:
                return "stop", None
            if token in self.params.stop_token_ids:
                return "stop", token
        if generated >= self.params.max_tokens or len(self.tokens) >= max_model_len:
            return "length", None
        return None, None

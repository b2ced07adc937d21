"""Every message that crosses the queue between the front end and an engine core.

Arrays inside a message travel as raw frames behind its msgpack head (see `transport`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one sequence. Values are checked at the API's edge, not here."""

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
    eos_token_ids: tuple[int, ...] = ()  # end the sequence, with no stop_reason
    stop_token_ids: tuple[int, ...] = ()  # end it as well and are named in stop_reason
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    logprobs: int | None = None  # alternatives to report beside the sampled token
    prompt_logprobs: int | None = None
    grammar: str = ""  # that the output is held to (see `grammar`); empty: none

    def leaves_choice(self, vocab_size: int) -> bool:
        """Whether some token may come at every position, as far as that can be known beforehand."""
        forbidden = {word[0] for word in self.bad_words if len(word) == 1}
        if self.min_tokens > 0:
            forbidden.update(self.eos_token_ids, self.stop_token_ids)
        if self.allowed_token_ids:
            return not forbidden.issuperset(self.allowed_token_ids)
        return len(forbidden) < vocab_size


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Generate one sequence after `prompt` (1-D int32)."""

    request_id: str
    prompt: TokenArray
    params: SamplingParams
    priority: int = 0  # lower goes first, under the priority policy
    cache_salt: str | None = None  # prefix blocks are shared only between equal salts


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; nothing more is sent about them."""

    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask the loop for a `Pong`."""

    serial: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the loop."""


FrontMessage = AddRequest | Abort | Ping | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: first the token itself, then the likeliest ones in order.

    `ranks` count from 1; the three lists have equal length.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceOutput(msgspec.Struct, array_like=True):
    """What one step brought for one sequence."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token; none for the first position
    cached_tokens: int = 0  # prompt tokens that the prefix cache held
    scheduled_at: float = 0.0  # monotonic seconds
    error: str | None = None


class StepStats(msgspec.Struct, array_like=True):
    """State of the engine after a step; counters are what this step added."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    step_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0


class StepOutput(msgspec.Struct, tag="step"):
    """One message a step, with all its sequences."""

    outputs: list[SequenceOutput]
    stats: StepStats


class ModelInfo(msgspec.Struct, frozen=True):
    """What the front end needs to know of a loaded model."""

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


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; requests may come."""

    info: ModelInfo


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The loop came by."""

    serial: int


class CoreDied(msgspec.Struct, frozen=True, tag="died"):
    """The core's last word."""

    error: str


CoreMessage = Ready | StepOutput | Pong | CoreDied

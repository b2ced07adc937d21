"""What the scheduler tells the model runner, and what it hears back. Values; nobody changes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.wire.protocol import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters the batch, for the first time or again after preemption.

    `prompt_logprobs`: alternatives to report at positions of the prompt; none if nothing is to be reported.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens [start, start + count) of a sequence.

    `new_blocks` are appended to its block table first; `samples`: it has then caught up and gets its next token. The
    last tokens may be a `draft`, which stands as long as it is what the model says: each right token gives one more.
    """

    request_id: str
    start: int
    count: int
    new_blocks: tuple[int, ...]
    samples: bool
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step: sequences that leave the batch, those that enter it, and the work on all in it."""

    removed: list[str] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(item.count for item in self.work)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of one sequence: one, and one more for each token of its draft that was right.

    With an `error` the last token is none: the sequence cannot go on.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model made of a plan. `prompt_logprobs` holds the positions that this step computed."""

    sampled: list[Sampled]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

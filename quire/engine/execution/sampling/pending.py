"""The interface of samplers: tokens may be known at once, or when a device has sampled them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.scheduling.plan import SequenceError
from quire.kernels.sampling import TokenChoices


class SampledToken(NamedTuple):
    """A sampled token and its log-probabilities, if requested. With an `error` there is no valid token."""

    token: int
    logprobs: TokenLogprobs | None
    error: SequenceError | None = None


class PendingTokens(Protocol):
    """The tokens that a step samples."""

    def is_done(self) -> bool:
        """Whether they are known."""

    def result(self) -> list[SampledToken]:
        """Wait for them. Called once, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class KnownTokens(PendingTokens):
    """Tokens that are known."""

    tokens: list[SampledToken]

    @override
    def is_done(self) -> bool:
        return True

    @override
    def result(self) -> list[SampledToken]:
        return self.tokens


class TokenSampler(Protocol):
    """Samples the next token of each sequence whose known tokens are all computed.

    Attributes:
        max_steps_in_flight: steps that may be sampled before the result of the first of them is known.
    """

    max_steps_in_flight: int

    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        """Follow the rows of the table: some were freed, then some were filled."""

    def start(self, logits: Tensor, rows: Sequence[int]) -> PendingTokens:
        """Sample a token of each of `rows` of the table from logits (rows, vocab) float32, which may be changed."""

    def verify(self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
        """Sample from the logits of each sequence's last known token and of its draft, as far as that is confirmed.

        Args:
            logits: (sum of the drafts' lengths + 1, vocab) float32, which may be changed; those of a sequence follow
                each other.
            rows: rows of the table.
            drafts: the draft of each row; may be empty.
        """

    def sample_following(
        self, rows: Sequence[int], steps: int, run: Callable[[TokenChoices], list[list[int]] | None]
    ) -> list[list[SampledToken]] | None:
        """Sample the tokens of decode steps that follow each other, where a function runs them and chooses the tokens.

        Args:
            rows: rows of the table.
            steps: how many, at most.
            run: runs the steps, and returns the tokens of each row; None: they need Python between them.

        Returns:
            The tokens of each row. None if they were not run, as always where this is not overridden.
        """
        return None

    def close(self) -> None:
        """End threads."""

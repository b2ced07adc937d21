"""The interface of what watches the steps of an engine, inside of its thread or process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.engine.client.protocol import AddRequest, RequestOutput


class StepShare(NamedTuple):
    """What a step computes for one sequence.

    Attributes:
        tokens: tokens that are computed, drafts included.
        samples: the next token is sampled: none of the prompt is left.
    """

    request_id: str
    tokens: int
    samples: bool


class StepObserver(Protocol):
    """Watches the steps of one engine. Its methods must not block."""

    def on_add(self, message: AddRequest) -> None:
        """A request has arrived."""

    def on_step(
        self, shares: Sequence[StepShare], outputs: Sequence[RequestOutput], began: float, ended: float
    ) -> None:
        """A step has ended. `began`: monotonic seconds when it was scheduled; others may have run until it began."""

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """Requests were aborted; some may have ended before."""

"""Scaling: how an operator sees the replicas of a model, and changes their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.client.replicas.replica import Replica


class Scaling(Protocol):
    """The replicas of a model, whose number can be changed while they work."""

    @property
    def is_scaling(self) -> bool:
        """Whether the number is being changed."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, by rank."""

    async def scale(self, size: int, drain_timeout: float) -> None:
        """Start replicas, or remove those with the highest ranks once their requests have ended.

        Args:
            size: the number of replicas that there are to be.
            drain_timeout: seconds in which their requests end.

        Raises:
            DrainTimedOut: they have not; all replicas go on.
            CommandRefused: the number is being changed, or a replica cannot be started; there are as many as before.
        """

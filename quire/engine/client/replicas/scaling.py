"""Scaling: how an operator sees the replicas of a model, and changes their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.client.errors import CommandRefused
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


def check_scalable(*, has_part_of_replicas: bool, is_scaling: bool) -> None:
    """Check that the number of replicas may be changed now.

    Raises:
        CommandRefused: it is being changed, or other servers have replicas of the model.
    """
    if has_part_of_replicas:
        raise CommandRefused(
            "With --data-parallel-hybrid-lb a server keeps its replicas: other servers have the next ranks."
        )
    if is_scaling:
        raise CommandRefused("The number of replicas is being changed already.")

"""What the endpoints of a server want of its other processes (--api-server-count)."""

from __future__ import annotations

from typing import Protocol

from typing_extensions import override


class OtherProcesses(Protocol):
    """The other processes of the server that serve HTTP."""

    @property
    def count(self) -> int:
        """How many there are."""

    async def in_flight(self) -> int:
        """Return how many requests they are answering."""

    async def reset_media_caches(self) -> None:
        """Let them read and prepare media anew."""


class NoOtherProcesses(OtherProcesses):
    """There are none."""

    count = 0

    @override
    async def in_flight(self) -> int:
        return 0

    @override
    async def reset_media_caches(self) -> None:
        pass

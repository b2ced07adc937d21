"""What the client of an engine tells those of the other front ends that share the engine with it."""

from __future__ import annotations

from typing import Literal, Protocol

from typing_extensions import override

Notice = Literal["falls_asleep", "asleep", "stays_awake", "paused", "updated"]
"""What is being done to the engine.

- falls_asleep: new requests are refused; those that have begun may still end.
- asleep: all requests are ended, as the engine is put to sleep now.
- stays_awake: it is not put to sleep after all, or that is over.
- paused, updated: all requests are ended for a pause, or for other weights.
"""


class Siblings(Protocol):
    """The other front ends of the server."""

    async def tell(self, notice: Notice) -> None:
        """Tell them, and wait until they have done what it means, and the core has got what they have sent it."""


class NoSiblings(Siblings):
    """There are no others."""

    @override
    async def tell(self, notice: Notice) -> None:
        pass

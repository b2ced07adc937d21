"""BlockSource and RemoteSources: what the scheduler asks of those that have blocks which are not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.scheduling.request import BlockHash


class BlockSource(Protocol):
    """A tier of the prefix cache, or another engine. Nothing waits for it."""

    def has(self, key: BlockHash) -> bool:
        """Return whether a block is probably there."""

    def load(self, serial: int, keys: Sequence[BlockHash]) -> None:
        """Begin to read blocks."""

    def cancel(self, serial: int) -> None:
        """Read no more blocks of a load."""


class RemoteSources(Protocol):
    """The engines that requests name."""

    def source(self, remote: RemoteBlocks) -> BlockSource:
        """Return the source of a prompt's blocks. It has all of them, as it says; who reads them releases them."""

    def release(self, remote: RemoteBlocks) -> None:
        """Tell an engine that it need not keep blocks, none of which were read."""


@dataclass(frozen=True, slots=True)
class RemoteLoading:
    """How blocks of other engines are loaded.

    Attributes:
        timeout: seconds that a request waits for its blocks.
        recomputes: a request whose blocks cannot be read is computed; else it fails.
    """

    sources: RemoteSources
    timeout: float
    recomputes: bool

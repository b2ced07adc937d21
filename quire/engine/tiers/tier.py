"""Tier: a store of computed KV blocks outside of the memory that steps read them from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from typing_extensions import Buffer


class Tier(Protocol):
    """A store of the bytes of blocks by their keys, which may forget any of them at any time.

    `has` may be called from any thread, the other methods from one thread only.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""

    def has(self, key: bytes) -> bool:
        """Return whether a block is probably there."""

    def get(self, key: bytes) -> bytes | None:
        """Return a block as it was put; None: it is not there, or damaged."""

    def put(self, key: bytes, data: Buffer) -> bool:
        """Keep a block; other blocks may go for it. Returns whether it is there now."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were used: they are kept longer than others."""

    def evict(self, keys: Iterable[bytes]) -> None:
        """Forget blocks."""

    def clear(self) -> None:
        """Forget all blocks."""

    def take_removed(self) -> list[bytes]:
        """Return the keys of blocks that have gone since the last call, whoever has removed them."""

    def refresh(self) -> None:
        """Notice what others have done to the store. Called now and then while there is nothing else to do."""

    def close(self) -> None:
        """Release files. Nothing is called afterwards."""

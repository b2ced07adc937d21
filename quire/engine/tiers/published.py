"""PublishedBlocks: which blocks of a tier were published as KV events, and what is to be published."""

from __future__ import annotations

from typing import NamedTuple


class TierChanges(NamedTuple):
    """Keys of blocks that can be found in a tier now, and of those that cannot any more."""

    stored: list[bytes]
    removed: list[bytes]


class PublishedBlocks:
    """Collect changes of a tier. Removals are published of published blocks alone: others may be in it.

    Not safe for threads.
    """

    def __init__(self) -> None:
        self._published: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}  # whether a block was stored or removed; of blocks that were published

    def stored(self, key: bytes) -> None:
        """Note that a block is there."""
        if key not in self._published:
            self._published.add(key)
            self._change(key, is_stored=True)

    def removed(self, key: bytes) -> None:
        """Note that a block is not there any more."""
        if key in self._published:
            self._published.remove(key)
            self._change(key, is_stored=False)

    def lost_all(self) -> None:
        """Note that no block is there any more."""
        for key in [*self._published]:
            self.removed(key)

    def forget(self) -> None:
        """Note that the subscribers have forgotten all."""
        self._published.clear()
        self._changes.clear()

    def take(self) -> TierChanges:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return TierChanges(stored, [key for key, is_stored in changes.items() if not is_stored])

    def _change(self, key: bytes, *, is_stored: bool) -> None:
        if self._changes.pop(key, None) is None:  # else this change takes back one that was not published
            self._changes[key] = is_stored

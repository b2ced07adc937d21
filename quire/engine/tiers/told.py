"""ToldBlocks: which blocks of a tier have been told to those who follow the prefix cache, and what is to be told."""

from __future__ import annotations

from typing import NamedTuple


class TierChanges(NamedTuple):
    """Keys of blocks that can be found in a tier now, and of those that cannot any more."""

    stored: list[bytes]
    removed: list[bytes]


class ToldBlocks:
    """Collect changes of a tier. What was removed is told of blocks alone that were told before: others may be in it.

    Not safe for threads.
    """

    def __init__(self) -> None:
        self._told: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}  # whether a block was stored or removed; a part of all that were told

    def stored(self, key: bytes) -> None:
        """Note that a block is there."""
        if key not in self._told:
            self._told.add(key)
            self._change(key, is_stored=True)

    def removed(self, key: bytes) -> None:
        """Note that a block is not there any more."""
        if key in self._told:
            self._told.remove(key)
            self._change(key, is_stored=False)

    def forget(self) -> None:
        """Note that those who were told have forgotten all."""
        self._told.clear()
        self._changes.clear()

    def take(self) -> TierChanges:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return TierChanges(stored, [key for key, is_stored in changes.items() if not is_stored])

    def _change(self, key: bytes, *, is_stored: bool) -> None:
        if self._changes.pop(key, None) is None:  # else the change before has not been told, and this one takes it back
            self._changes[key] = is_stored

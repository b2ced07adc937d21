"""BlockObserver: is told which blocks the prefix cache has computed, and which it has lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass

from quire.engine.scheduling.request import BlockHash, ExtraKey


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of the prefix cache whose step has ended.

    Attributes:
        block: its index in the pool.
        key: hash of all tokens up to its end and of everything else that its keys and values depend on. Equal in all
            processes, and for the blocks of all groups with the same tokens.
        parent: the key of the block before it; None: it is the first of its sequence.
        tokens: its tokens, as many as a block has.
        group: index of the group of layers that it is of.
        extra_keys: what it depends on beside the tokens: of each block the adapter (digest of its content) and the
            media with tokens in it, of the first one also what separates whole sequences, such as the salt.
    """

    block: int
    key: BlockHash
    parent: BlockHash | None
    tokens: array[int]
    group: int = 0
    extra_keys: tuple[ExtraKey, ...] = ()


class BlockObserver(ABC):
    """Is told of computed blocks alone, by the thread of the scheduler, which a method must not hold up.

    Every block that is removed was stored before. A block that is registered and whose step fails is never stored.
    """

    @abstractmethod
    def stored(self, block: StoredBlock) -> None:
        """Note that the keys and values of a block can be read."""

    @abstractmethod
    def removed(self, block: int, key: BlockHash, group: int) -> None:
        """Note that a block will be overwritten, or must not be read. The next step that is submitted may write it."""

    def invalidated(self, block: int, key: BlockHash, group: int) -> None:
        """Note that a block was removed because it may hold NaN, or was not computed; by default as any other."""
        self.removed(block, key, group)

    @abstractmethod
    def cleared(self) -> None:
        """Note that all stored blocks are lost."""

    def step_ended(self) -> None:  # noqa: B027 most observers have nothing to do
        """Note that a step has ended, or the cache was cleared: what was told before belongs together."""

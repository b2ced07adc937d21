"""UnsavedBlocks and LoadRule: which blocks tiers are to keep, and when it is faster to load than to compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from quire.engine.client.protocol import LoadSource
from quire.engine.scheduling.block_observer import BlockObserver, StoredBlock
from quire.engine.scheduling.block_source import BlockSource
from quire.engine.scheduling.request import BlockHash


class BlockTier(BlockSource, Protocol):
    """What the scheduler asks of the tiers, which keep what is computed here."""

    def slowest(self, keys: Sequence[BlockHash]) -> LoadSource:
        """Return the slowest place that some of these blocks are read from."""

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Note that blocks were used."""

    def evict(self, keys: Iterable[BlockHash]) -> None:
        """Forget blocks, which may hold NaN."""

    def in_memory(self, key: BlockHash) -> None:
        """Note that a block of the tier is in memory, too."""

    def subscribers_forgot(self) -> None:
        """Note that those who follow the prefix cache have forgotten all."""


class UnsavedBlock(NamedTuple):
    """A computed block that a tier lacks: where it is, and its key."""

    block: int
    key: BlockHash


def group_key(key: BlockHash, group: int) -> BlockHash:
    """Return the key of a group's block with the same tokens."""
    return key + bytes((group,)) if group else key


def split_key(key: BlockHash) -> tuple[BlockHash, int]:
    """Return the hash of a block's tokens and its group; see `group_key`. Hashes have an even number of bytes."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)


class UnsavedPlaces:
    """Know the places whose blocks a tier lacks, in the order in which they got them."""

    def __init__(self, tier: BlockTier) -> None:
        self._tier = tier
        self._key_at: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._key_at)

    def add(self, place: int, key: BlockHash) -> None:
        """Note that a place has a block."""
        if self._tier.has(key):
            self._tier.in_memory(key)
        else:
            self._key_at[place] = key

    def pop(self, place: int) -> BlockHash | None:
        """Note that a place has another block; returns the key of what it had, if the tier lacks it."""
        return self._key_at.pop(place, None)

    def clear(self) -> None:
        """Note that no place has a block."""
        self._key_at.clear()

    def take(self, count: int) -> list[UnsavedBlock]:
        """Return up to `count` blocks that are saved now, those first that were there first."""
        taken = list[UnsavedBlock]()
        while self._key_at and len(taken) < count:
            place = next(iter(self._key_at))
            key = self._key_at.pop(place)
            if not self._tier.has(key):  # another server may have written it
                taken.append(UnsavedBlock(place, key))
        return taken


class UnsavedBlocks(BlockObserver):
    """Know the computed blocks that a tier lacks, and those that a step may overwrite."""

    def __init__(self, tier: BlockTier) -> None:
        self._tier = tier
        self._unsaved = UnsavedPlaces(tier)
        self._leaving: list[UnsavedBlock] = []
        self._removed: set[int] | None = set()  # None: all

    def __len__(self) -> int:
        return len(self._unsaved)

    @override
    def stored(self, block: StoredBlock) -> None:
        self._unsaved.add(block.block, group_key(block.key, block.group))

    @override
    def removed(self, block: int, key: BlockHash, group: int) -> None:
        self._note_removed(block)
        if (unsaved := self._unsaved.pop(block)) is not None:
            self._leaving.append(UnsavedBlock(block, unsaved))

    @override
    def invalidated(self, block: int, key: BlockHash, group: int) -> None:
        self._note_removed(block)
        self._unsaved.pop(block)
        self._tier.evict([group_key(key, group)])

    @override
    def cleared(self) -> None:
        self._removed = None
        self._unsaved.clear()
        self._leaving.clear()
        self._tier.subscribers_forgot()

    def take_leaving(self) -> list[UnsavedBlock]:
        """Return the blocks that the next step may overwrite, and that the tier lacks."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def take_removed(self) -> set[int] | None:
        """Return all blocks that the next step may overwrite; None: any may be."""
        removed, self._removed = self._removed, set()
        return removed

    def take(self, count: int) -> list[UnsavedBlock]:
        """Return up to `count` blocks that are saved now, those first that were computed first."""
        return self._unsaved.take(count)

    def _note_removed(self, block: int) -> None:
        if self._removed is not None:
            self._removed.add(block)


_NEW_SHARE = 0.3  # of a new measurement in the mean
_FORGOTTEN_AFTER = 60.0  # seconds; a disk that was slow once is tried again
_LEAST_TOKENS = 64  # of a step whose speed is that of a prefill
_PATIENCE = 5.0  # seconds that a load may take while nothing is known of the speed of computing
_SHORTEST = 0.05  # seconds; steps of other requests pass between the blocks of a load


class LoadRule:
    """Compare the time to load blocks with the time to compute them, by the speeds that were measured last.

    Host memory and disk have speeds of their own; a load counts as one of the slowest place that it reads from.
    """

    def __init__(self, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_bytes = block_bytes
        self._clock = clock
        self._load_speed: dict[LoadSource, float] = {}  # bytes per second
        self._loaded_at: dict[LoadSource, float] = {}
        self._compute_speed: float | None = None  # tokens per second

    def loads(self, blocks: int, tokens: int, source: LoadSource = "disk") -> bool:
        """Return whether to load so many blocks rather than to compute the tokens in them. Unknown: try it."""
        if self._clock() - self._loaded_at.get(source, 0.0) > _FORGOTTEN_AFTER:
            self._load_speed.pop(source, None)
        speed = self._load_speed.get(source)
        if speed is None or self._compute_speed is None:
            return True
        return blocks * self._block_bytes / speed < tokens / self._compute_speed

    def patience(self, tokens: int) -> float:
        """Return the seconds after which a load is given up: those in which the tokens would have been computed."""
        if self._compute_speed is None:
            return _PATIENCE
        return max(_SHORTEST, tokens / self._compute_speed)

    def loaded(self, blocks: int, seconds: float, source: LoadSource = "disk") -> None:
        """Note how long a load has taken, from its beginning until its blocks could be read."""
        if blocks:
            speed = blocks * self._block_bytes / max(seconds, 1e-6)
            self._note(source, _mean(self._load_speed.get(source), speed))

    def given_up(self, blocks: int, seconds: float, source: LoadSource = "disk") -> None:
        """Note a load of which only so many blocks came in time."""
        self._note(source, max(1, blocks) * self._block_bytes / max(seconds, 1e-6))

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how long a step has taken, and how many tokens it computed."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self._compute_speed = _mean(self._compute_speed, tokens / seconds)

    def _note(self, source: LoadSource, speed: float) -> None:
        self._load_speed[source], self._loaded_at[source] = speed, self._clock()


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW_SHARE * (new - before)

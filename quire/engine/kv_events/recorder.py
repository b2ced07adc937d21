"""EventRecorder: makes events of what happens to blocks, and hands them to a publisher at the end of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from quire.engine.client.protocol import LoadSource
from quire.engine.kv_events.messages import (
    FIRST_TIER,
    MEDIUM_OF,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    external_hash,
)
from quire.engine.scheduling.block_observer import BlockObserver, StoredBlock
from quire.engine.scheduling.request import BlockHash
from quire.engine.scheduling.tier_blocks import split_key

LARGEST_BATCH = 16 << 10  # estimated bytes after which a batch is handed over before its step has ended
_HASH, _TOKEN, _KEY = 9, 5, 16  # most bytes of a hash and of a token in msgpack; those beside the text of an extra key


class EventRecorder(BlockObserver):
    """Record the events of a pool, in the thread of the scheduler.

    Blocks of a sequence that follow each other are one event.
    """

    def __init__(
        self,
        publish: Callable[[EventBatch, int], None],
        groups: Sequence[tuple[str, int | None]] = (("full_attention", None),),
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a recorder, which has all consumers forget what an earlier process has told them.

        Args:
            publish: takes a batch, and about how many bytes it has.
            groups: of each group of layers, how they attend and the number of tokens that they attend to; None: all.
            rank: which of several replicas the pool belongs to.
            clock: seconds since 1970.
        """
        self._groups = groups
        self._publish = publish
        self._rank = rank
        self._clock = clock
        self._events: list[Event] = [AllBlocksCleared()]
        self._bytes = 0  # of `_events`, estimated
        self._growing: dict[int, tuple[BlockStored, BlockHash]] = {}  # by group, the last event and its last block
        self.step_ended()

    @override
    def stored(self, block: StoredBlock) -> None:
        growing = self._growing.get(block.group)
        if growing is not None and growing[1] == block.parent:
            event = growing[0]
        else:
            kind, window = self._groups[block.group]
            event = BlockStored(
                block_hashes=[],
                parent_block_hash=None if block.parent is None else external_hash(block.parent),
                token_ids=[],
                block_size=len(block.tokens),
                lora_id=None,
                medium=FIRST_TIER,
                lora_name=None,
                extra_keys=[],
                group_idx=block.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            self._events.append(event)
        event.block_hashes.append(external_hash(block.key))
        event.token_ids += block.tokens
        assert event.extra_keys is not None
        event.extra_keys.append(block.extra_keys or None)
        self._growing[block.group] = event, block.key
        extra = sum(_KEY + len(key if isinstance(key, str) else key[0]) for key in block.extra_keys)
        self._count(_HASH + _TOKEN * len(block.tokens) + extra)

    @override
    def removed(self, block: int, key: BlockHash, group: int) -> None:
        # What is stored afterwards may be the same block, so that no earlier event may get it.
        self._growing.clear()
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(external_hash(key))
        else:
            hashes = [external_hash(key)]
            self._events.append(BlockRemoved(block_hashes=hashes, medium=FIRST_TIER, group_idx=group))
        self._count(_HASH)

    @override
    def cleared(self) -> None:
        self._growing.clear()
        self._events.append(AllBlocksCleared())

    @override
    def step_ended(self) -> None:
        if self._events:
            self._publish(EventBatch(self._clock(), self._events, self._rank), self._bytes)
            self._events, self._bytes = [], 0
            self._growing.clear()

    def tier_changed(self, source: LoadSource, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Note that blocks can be found in a tier behind the first, and that others cannot any more.

        What the first tier has was told in an earlier step: those who follow find the tokens of a block by its hash.
        """
        for group, hashes in _by_group(removed).items():
            self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_OF[source], group_idx=group))
            self._count(_HASH * len(hashes))
        for group, hashes in _by_group(stored).items():
            kind, window = self._groups[group]
            self._events.append(
                BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=MEDIUM_OF[source],
                    lora_name=None,
                    group_idx=group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                )
            )
            self._count(_HASH * len(hashes))
        self.step_ended()

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes >= LARGEST_BATCH:
            self.step_ended()


def _by_group(keys: Iterable[BlockHash]) -> dict[int, list[Hash]]:
    """Return the hashes of blocks by their groups, for keys of `group_key`."""
    hashes: dict[int, list[Hash]] = {}
    for key in keys:
        block, group = split_key(key)
        hashes.setdefault(group, []).append(external_hash(block))
    return hashes

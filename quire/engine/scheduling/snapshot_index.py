"""SnapshotIndex: which states are saved, by the tokens before them, and which of them are given up first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.engine.scheduling.request import BlockHash

_SPARE_HEAP = 64  # entries of the heap that may be outdated, beside as many as there are snapshots


@dataclass(slots=True, eq=False)
class Snapshot:
    """The saved states behind a number of blocks of tokens.

    Attributes:
        place: where the runner has them.
        blocks: how many blocks of tokens they are behind.
        parent: hash of the snapshot before them on their chain; None: there is none.
        cost: tokens since that snapshot, which would be computed again without this one.
        children: hashes of the snapshots whose parent it is.
        owner: id of the request that is still generating, and replaces it by its next one; "": there is none.
        serial: of its last entry in the heap; earlier ones are outdated.
    """

    place: int
    blocks: int
    parent: BlockHash | None
    cost: int
    owner: str = ""
    children: set[BlockHash] = field(default_factory=set)
    serial: int = 0


class SnapshotIndex:
    """Assign the places of a store of snapshots, all of one size, to hashes of blocks.

    When all places are taken, that snapshot goes whose tokens cost least to compute again. Its cost is then added to
    that of all that come or are used later, so that old ones go in the end whatever they cost (GreedyDual). Among equal
    ones the least recently used goes first.
    """

    def __init__(self, places: int, block_size: int) -> None:
        self.num_places = places
        self.evicted: list[BlockHash] = []  # since somebody has taken them away
        self._block_size = block_size
        self._free = list(range(places - 1, -1, -1))
        self._by_hash: dict[BlockHash, Snapshot] = {}
        self._heap: list[tuple[int, int, BlockHash]] = []  # priority, serial, hash
        self._serials = itertools.count(1)
        self._floor = 0  # priority of the last one that was given up

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._by_hash

    def counts(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """Yield the numbers of blocks behind which there is a snapshot, the largest first."""
        return (index + 1 for index in reversed(range(len(hashes))) if hashes[index] in self._by_hash)

    def use(self, key: BlockHash) -> int:
        """Note that a request begins behind a snapshot; returns its place. It is nobody's to replace any more."""
        snapshot = self._by_hash[key]
        snapshot.owner = ""
        self._push(key, snapshot)
        return snapshot.place

    def keep(self, key: BlockHash) -> None:
        """Note that the states of a snapshot were computed again."""
        self._push(key, self._by_hash[key])

    def take_place(self) -> int | None:
        """Return a place for new states; None: all are being filled."""
        if not self._free and not self._evict_cheapest():
            return None
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """Note that nothing useful was stored in a place that was taken."""
        self._free.append(place)

    def add(self, place: int, hashes: Sequence[BlockHash], owner: str = "") -> None:
        """Register the states that are stored in a place that was taken, behind blocks with these hashes."""
        key, blocks = hashes[-1], len(hashes)
        if key in self._by_hash:
            self._free.append(place)
            return
        before = next(self.counts(hashes[:-1]), 0)
        parent = hashes[before - 1] if before else None
        if parent is not None:
            self._by_hash[parent].children.add(key)
        snapshot = Snapshot(place, blocks, parent, (blocks - before) * self._block_size, owner)
        self._by_hash[key] = snapshot
        self._push(key, snapshot)

    def replace(self, key: BlockHash, owner: str) -> None:
        """Free the place of a snapshot that a request has made, unless another has used it."""
        snapshot = self._by_hash.get(key)
        if snapshot is not None and snapshot.owner == owner:
            self.drop(key)

    def drop(self, key: BlockHash) -> None:
        """Forget a snapshot, if there is one. Those behind it then cost more."""
        snapshot = self._by_hash.pop(key, None)
        if snapshot is None:
            return
        self._free.append(snapshot.place)
        parent = None if snapshot.parent is None else self._by_hash[snapshot.parent]
        if parent is not None:
            parent.children.remove(key)
        for name in snapshot.children:
            child = self._by_hash[name]
            child.parent, child.cost = snapshot.parent, child.cost + snapshot.cost
            if parent is not None:
                parent.children.add(name)
            self._push(name, child)

    def clear(self) -> None:
        """Forget all snapshots."""
        self._free += [snapshot.place for snapshot in self._by_hash.values()]
        self._by_hash.clear()
        self._heap.clear()

    def check(self, taken: Sequence[int]) -> None:
        """Assert that each place is free, taken, or that of one snapshot."""
        places = [snapshot.place for snapshot in self._by_hash.values()]
        assert sorted([*self._free, *taken, *places]) == [*range(self.num_places)], "places of snapshots got lost"
        for key, snapshot in self._by_hash.items():
            assert snapshot.parent is None or key in self._by_hash[snapshot.parent].children, "a parent got lost"
            assert all(self._by_hash[name].parent == key for name in snapshot.children), "a child got lost"
        current = {serial for _, serial, _ in self._heap}
        assert all(snapshot.serial in current for snapshot in self._by_hash.values()), "a snapshot cannot be evicted"

    def _push(self, key: BlockHash, snapshot: Snapshot) -> None:
        snapshot.serial = next(self._serials)
        heapq.heappush(self._heap, (self._floor + snapshot.cost, snapshot.serial, key))
        if len(self._heap) > 2 * len(self._by_hash) + _SPARE_HEAP:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, int, BlockHash]) -> bool:
        _, serial, key = entry
        snapshot = self._by_hash.get(key)
        return snapshot is not None and snapshot.serial == serial

    def _evict_cheapest(self) -> bool:
        """Give up a snapshot; False: there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                self._floor, _, key = entry
                self.drop(key)
                self.evicted.append(key)
                return True
        return False

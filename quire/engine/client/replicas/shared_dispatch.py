"""SharedDispatch: what the front ends of a server know together of the replicas that they share. Linux only.

It is in memory that all of them have mapped. Loads and operations are counted in columns, of which each process writes
its own, so that those of a process that dies are cleared. Prefixes are in tables that all write without a lock: what
two write at the same moment may be lost, and costs at most that blocks are computed again.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from quire.engine.client.replicas.load import Load
from quire.engine.client.replicas.operation import Operations
from quire.engine.client.replicas.prefix_index import Prefixes

LARGEST_SET = 64  # replicas
_MOST_BLOCKS = 1 << 17  # of a table of prefixes
_ROOM = 2  # entries of a table for each block, as they are in sets of `_WAYS`
_WAYS = 8
_SWEEPS = 16  # parts of the capacity after which a process looks whether there are too many keys
_WORD = 8  # bytes


class SharedDispatch:
    """The mapped memory. A process makes it, and forks those that share it; each then says which one it is."""

    def __init__(self, processes: int) -> None:
        """Make it. `processes`: that share it. Pages that nobody writes take no memory."""
        table = _MOST_BLOCKS * _ROOM
        columns, tables = processes * (2 * LARGEST_SET + 1), LARGEST_SET * 2 * table
        file = os.memfd_create("quire-dispatch")
        try:
            os.ftruncate(file, _WORD * (columns + tables))
            mapped = mmap.mmap(file, _WORD * (columns + tables))
        finally:
            os.close(file)
        words = np.frombuffer(mapped, np.int64)
        of_processes = words[:columns].reshape(processes, 2 * LARGEST_SET + 1)
        self._requests = of_processes[:, :LARGEST_SET]
        self._operations = of_processes[:, -1]
        self._tokens = of_processes.view(np.float64)[:, LARGEST_SET:-1]
        self._tables = words[columns:].view(np.uint64).reshape(LARGEST_SET, 2, table)
        self._index = 0

    def use(self, index: int) -> None:
        """Say which of the processes this one is."""
        self._index = index

    def clear(self, index: int) -> None:
        """Forget what a process has counted, which has ended."""
        self._requests[index], self._tokens[index], self._operations[index] = 0, 0.0, 0

    def load(self, number: int) -> Load:
        """Return the load of a replica, by its number in the set."""
        return SharedLoad(self._tokens[:, number], self._requests[:, number], self._index)

    def prefixes(self, number: int, num_blocks: int) -> Prefixes:
        """Return what the cache of a replica holds, which has so many blocks."""
        keys, stamps = self._tables[number]
        return SharedPrefixes(keys, stamps, num_blocks)

    def operations(self) -> Operations:
        """Return the operations that run on all replicas."""
        return SharedOperations(self._operations, self._index)


class SharedLoad(Load):
    """The load of a replica, of which each process has counted a part."""

    def __init__(self, tokens: NDArray[np.float64], requests: NDArray[np.int64], index: int) -> None:
        """Begin with what the others have counted. `index`: the part of this process."""
        super().__init__()
        self._all_tokens, self._all_requests = tokens, requests
        self._index = index
        self.add(0.0, 0)

    @property
    @override
    def tokens(self) -> float:
        return float(self._all_tokens.sum())

    @property
    @override
    def requests(self) -> int:
        return int(self._all_requests.sum())

    @override
    def add(self, tokens: float, requests: int) -> None:
        super().add(tokens, requests)
        self._all_tokens[self._index], self._all_requests[self._index] = self.tokens_here, self.requests_here


class SharedOperations(Operations):
    """The operations of all processes."""

    def __init__(self, counts: NDArray[np.int64], index: int) -> None:
        super().__init__()
        self._counts = counts
        self._index = index

    @property
    @override
    def count(self) -> int:
        return int(self._counts.sum())

    @override
    def add(self, count: int) -> None:
        super().add(count)
        self._counts[self._index] = self.count_here


class SharedPrefixes(Prefixes):
    """The keys of a replica's blocks, with the times of their last use, in sets by their lowest bits.

    The table has twice as many entries as the replica's cache has blocks. Whoever adds keys looks now and then whether
    they are more than blocks, and then clears those that were used least recently.
    """

    def __init__(self, keys: NDArray[np.uint64], stamps: NDArray[np.uint64], num_blocks: int) -> None:
        self._capacity = min(num_blocks, _MOST_BLOCKS)
        self._sets = max(1, self._capacity * _ROOM // _WAYS)
        size = self._sets * _WAYS
        self._keys, self._stamps = keys[:size].reshape(-1, _WAYS), stamps[:size].reshape(-1, _WAYS)
        self._added = 0  # since the last sweep of this process

    @override
    def matched(self, keys: Sequence[int]) -> int:
        if not keys:
            return 0
        asked, sets = self._places(keys)
        hits = (self._keys[sets] == asked[:, None]).any(axis=1)
        return len(keys) if hits.all() else int(np.argmin(hits))

    @override
    def add(self, keys: Sequence[int]) -> None:
        if not keys:
            return
        asked, sets = self._places(keys)
        times = np.uint64(time.monotonic_ns()) - np.arange(len(keys), dtype=np.uint64)  # its end leaves first
        hits = self._keys[sets] == asked[:, None]
        known = hits.any(axis=1)
        self._stamps[sets[known], hits[known].argmax(axis=1)] = times[known]
        new = np.flatnonzero(~known)
        self._added += len(new)
        for _ in range(_WAYS):  # one key of each set at a time, from the beginning of the prompt
            _, first = np.unique(sets[new], return_index=True)
            chosen = new[first]
            ways = self._stamps[sets[chosen]].argmin(axis=1)
            self._keys[sets[chosen], ways] = asked[chosen]
            self._stamps[sets[chosen], ways] = times[chosen]
            new = np.delete(new, first)
            if not len(new):
                break
        if self._added * _SWEEPS >= self._capacity:
            self._sweep()

    @override
    def clear(self) -> None:
        self._keys[:] = 0
        self._stamps[:] = 0

    def _places(self, keys: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The keys, and the sets where they are. An empty entry has the key 0."""
        asked = np.maximum(np.array(keys, np.uint64), np.uint64(1))
        return asked, (asked % np.uint64(self._sets)).astype(np.int64)

    def _sweep(self) -> None:
        """Clear the keys that were used least recently, if there are more than blocks."""
        self._added = 0
        excess = int(np.count_nonzero(self._keys)) - self._capacity
        if excess > 0:
            empty = self._keys.size - self._capacity - excess
            oldest = cast("np.uint64", np.partition(self._stamps, empty + excess - 1, axis=None)[empty + excess - 1])
            is_old = self._stamps <= oldest
            self._keys[is_old] = 0
            self._stamps[is_old] = 0

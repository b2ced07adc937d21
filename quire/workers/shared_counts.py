"""Counts that several processes of a server share, in a file in memory that all of them have mapped. Linux only.

What a process has counted is in columns of its own, which nobody else writes: when it dies, at whatever moment, its
columns are cleared, and the counts are right again. A lock makes looking and taking one step. The system gives it back
when its holder dies. No file is left behind: it has no name.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from typing_extensions import override

from quire.workers.shares import Refusal, Shares

_SETS, _WAYS = 512, 8  # rows of a table of tenants, and those of them that a tenant may have
_RECORDS = 4096  # rows of a table of records
_NUMBERS = 6  # of a record
_DIGEST = 16  # bytes
_WORD = 8  # bytes


class TooManyRecords(Exception):
    """A table of records is full."""


class SharedCounts:
    """The mapped file. A process makes it, forks those that share it, and each then says which one it is."""

    def __init__(self, processes: int, tables: int) -> None:
        """Make it. `processes`: that share it. `tables`: of tenants."""
        self.processes = processes
        self._index = 0
        counts = _SETS * _WAYS * (_DIGEST + _WORD * processes) + _WORD * processes
        records = _RECORDS * (_DIGEST + _WORD * (_NUMBERS + processes))
        self._file = os.memfd_create("quire-counts")
        os.ftruncate(self._file, tables * counts + records)
        view = memoryview(mmap.mmap(self._file, tables * counts + records))
        self._tables = [_Rows(view[i * counts : (i + 1) * counts], _SETS * _WAYS, processes) for i in range(tables)]
        self._totals = [view[(i + 1) * counts - _WORD * processes : (i + 1) * counts].cast("q") for i in range(tables)]
        self._records = _Rows(view[tables * counts :], _RECORDS, processes, numbers=_NUMBERS)

    def close(self) -> None:
        """Close the file. What is mapped stays until nobody refers to it."""
        os.close(self._file)

    def use(self, index: int) -> None:
        """Say which of the processes this one is."""
        self._index = index

    @property
    def index(self) -> int:
        """Which of the processes this one is."""
        return self._index

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other process is. It must not be entered twice, nor by several threads."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def clear(self, index: int) -> None:
        """Forget what a process has counted, which has ended."""
        with self.locked():
            for table in (*self._tables, self._records):
                table.counts[index :: self.processes] = table.zeros
            for totals in self._totals:
                totals[index] = 0

    def shares(self, table: int, capacity: int, share: float = 1.0) -> SharedShares:
        """Return the shares of tenants that a table has."""
        return SharedShares(self, self._tables[table], self._totals[table], capacity, share)

    def record(self, name: str) -> SharedRecord:
        """Return the record with a name, which is made if there is none; it stays.

        Raises:
            TooManyRecords: there are `_RECORDS` others.
        """
        rows, digest = self._records, _digest_of(name)
        first = int.from_bytes(digest[:2])
        with self.locked():
            for step in range(_RECORDS):
                row = (first + step) % _RECORDS
                if rows.digest(row) in (digest, bytes(_DIGEST)):
                    rows.set_digest(row, digest)
                    return SharedRecord(self, rows.numbers_of(row), rows.counts_of(row))
        raise TooManyRecords(f"with --api-server-count there may be {_RECORDS} API keys")


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """What is known of one name.

    Attributes:
        shared: has the lock, and says which process this one is.
        numbers: are written by all processes.
        counts: of each process.
    """

    shared: SharedCounts
    numbers: memoryview[float]
    counts: memoryview[int]


class _Rows:
    """The rows of a table: a digest, numbers, and a count of each process.

    Attributes:
        counts: of all rows, those of a row together.
        zeros: a column of counts.
    """

    def __init__(self, view: memoryview, rows: int, processes: int, *, numbers: int = 0) -> None:
        begin, end = rows * _DIGEST, rows * (_DIGEST + _WORD * numbers)
        self._digests = view[:begin]
        self._numbers = view[begin:end].cast("d")
        self._per_row = numbers
        self._processes = processes
        self.counts = view[end : end + rows * _WORD * processes].cast("q")
        self.zeros = memoryview(bytes(_WORD * rows)).cast("q")

    def digest(self, row: int) -> bytes:
        return bytes(self._digests[row * _DIGEST : (row + 1) * _DIGEST])

    def set_digest(self, row: int, digest: bytes) -> None:
        self._digests[row * _DIGEST : (row + 1) * _DIGEST] = digest

    def counts_of(self, row: int) -> memoryview[int]:
        return self.counts[row * self._processes : (row + 1) * self._processes]

    def numbers_of(self, row: int) -> memoryview[float]:
        return self._numbers[row * self._per_row : (row + 1) * self._per_row]


class SharedShares(Shares):
    """Shares of tenants, of whom each process of the server counts some.

    A tenant has one of the rows of its set. If all of these are in use by others, it shares one of them, and its limit.
    """

    def __init__(self, shared: SharedCounts, rows: _Rows, totals: memoryview[int], capacity: int, share: float) -> None:
        super().__init__(capacity, share)
        self._shared = shared
        self._rows = rows
        self._totals = totals
        self._own_held = Counter[str]()
        self._row_of: dict[str, int] = {}  # of tenants that hold something here

    @property
    @override
    def used(self) -> int:
        return sum(self._totals)

    @property
    @override
    def used_here(self) -> int:
        return self._totals[self._shared.index]

    @override
    def held(self, tenant: str) -> int:
        row = self._find(tenant)
        return 0 if row is None else sum(self._rows.counts_of(row))

    @override
    def take_if_free(self, tenant: str, count: int = 1) -> Refusal | None:
        with self._shared.locked():
            refusal = self.refusal(tenant, count)
            if refusal is None:
                self._add(tenant, count)
            return refusal

    @override
    def take(self, tenant: str, count: int = 1) -> None:
        with self._shared.locked():
            self._add(tenant, count)

    @override
    def give_back(self, tenant: str, count: int = 1) -> None:
        with self._shared.locked():
            self._add(tenant, -count)

    def _add(self, tenant: str, count: int) -> None:
        index = self._shared.index
        row = self._row_of.get(tenant)
        if row is None:
            row = self._row_of[tenant] = self._take_row(tenant)
        self._rows.counts_of(row)[index] += count
        self._totals[index] += count
        self._own_held[tenant] += count
        if not self._own_held[tenant]:
            del self._own_held[tenant], self._row_of[tenant]

    def _find(self, tenant: str) -> int | None:
        """The row of a tenant; None if it holds nothing."""
        row = self._row_of.get(tenant)
        if row is not None:
            return row
        digest = _digest_of(tenant)
        return next((row for row in _rows_of(digest) if self._rows.digest(row) == digest), None)

    def _take_row(self, tenant: str) -> int:
        digest = _digest_of(tenant)
        row = self._find(tenant)
        if row is not None:
            return row
        for row in _rows_of(digest):
            if not any(self._rows.counts_of(row)):
                self._rows.set_digest(row, digest)
                return row
        return _rows_of(digest)[digest[-1] % _WAYS]


def _rows_of(digest: bytes) -> range:
    """The rows that a tenant may have."""
    first = int.from_bytes(digest[:2]) % _SETS * _WAYS
    return range(first, first + _WAYS)


def _digest_of(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_DIGEST).digest()

"""HostIndex: which blocks the rows of a bounded host memory have, and which of them is the next to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Lost(NamedTuple):
    """A block that has given its row to another."""

    key: bytes
    row: int


class Place(NamedTuple):
    """The row that a block got. `lost`: what it had before; None: nothing."""

    row: int
    lost: Lost | None


class HostIndex:
    """The rows by the keys of their blocks, those used least recently first.

    A row that is in use, by a copy, is not given to another block; that of a block which was forgotten meanwhile is
    free once nothing uses it.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(rows)))
        self._uses: dict[int, int] = {}
        self._forgotten: set[int] = set()  # rows in use whose blocks were forgotten

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._row_of)

    @property
    def uses(self) -> int:
        """The number of uses of rows."""
        return sum(self._uses.values())

    @property
    def usage(self) -> float:
        """Share of the rows that have blocks."""
        return len(self._row_of) / self._rows

    def row(self, key: bytes) -> int | None:
        """Return the row of a block; None: it is not there."""
        return self._row_of.get(key)

    def take(self, key: bytes) -> Place | None:
        """Give a block that is not there a row; None: all of them are in use."""
        assert key not in self._row_of, "a block has two rows"
        lost = None
        if not self._free:
            oldest = next((old for old, row in self._row_of.items() if row not in self._uses), None)
            if oldest is None:
                return None
            lost = Lost(oldest, self._row_of.pop(oldest))
            self._free.append(lost.row)
        row = self._row_of[key] = self._free.pop()
        return Place(row, lost)

    def use(self, row: int) -> None:
        """Keep a row as it is."""
        self._uses[row] = self._uses.get(row, 0) + 1

    def end_use(self, row: int) -> None:
        """Take a use back."""
        self._uses[row] -= 1
        if not self._uses[row]:
            del self._uses[row]
            if row in self._forgotten:
                self._forgotten.remove(row)
                self._free.append(row)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were used, the last of them most recently."""
        for key in keys:
            if key in self._row_of:
                self._row_of.move_to_end(key)

    def forget(self, key: bytes) -> int | None:
        """Forget a block; returns the row that it had."""
        row = self._row_of.pop(key, None)
        if row is not None:
            if row in self._uses:
                self._forgotten.add(row)
            else:
                self._free.append(row)
        return row

    def known(self) -> list[bytes]:
        """Return the keys of all blocks."""
        return [*self._row_of]

    def check(self) -> None:
        """Assert that each row has a block, or is free, or in use alone."""
        rows = sorted([*self._row_of.values(), *self._free, *self._forgotten])
        assert rows == list(range(self._rows)), "rows of host memory are lost, or given twice"
        assert self._forgotten <= self._uses.keys(), "a row that nothing uses is not free"

"""What all sampling stages have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.wire.protocol import SamplingParams


class Stage(Protocol):
    """One concern of sampling. It keeps what it needs by row, and only for rows that use it."""

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """A sequence was put into a row; its known tokens are in the table."""

    def remove(self, row: int) -> None:
        """The row was emptied."""

    def observe(self, row: int, token: int) -> None:
        """The row got a token."""

    def apply(self, logits: Tensor, rows: Sequence[int], table: RequestTable) -> None:
        """Change logits (rows, vocab) in place; `rows` are their rows in the table."""

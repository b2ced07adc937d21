"""Pools the hidden states of prompts, which may be computed in several chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from quire.engine.execution.inputs import Span
from quire.engine.execution.table import RequestTable
from quire.engine.wire.protocol import PooledArray, PoolingParams


class _Pooling(ABC):
    """The pooled state of one sequence. `add` gets the hidden states of its tokens in order, chunk by chunk."""

    @abstractmethod
    def add(self, hidden: Tensor) -> None:
        """Take the hidden states (tokens, hidden) of the next tokens."""

    @abstractmethod
    def result(self) -> Tensor:
        """The pooled array, once all tokens were added."""


class _Last(_Pooling):
    def add(self, hidden: Tensor) -> None:
        self._last = hidden[-1].to(torch.float32, copy=True)

    def result(self) -> Tensor:
        return self._last


class _First(_Pooling):
    def __init__(self) -> None:
        self._first: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        if self._first is None:
            self._first = hidden[0].to(torch.float32, copy=True)

    def result(self) -> Tensor:
        assert self._first is not None
        return self._first


class _Mean(_Pooling):
    """Sums in float64, so that the order of the sums, and thus the chunking, does not show in float32."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        total = hidden.sum(0, dtype=torch.float64)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(hidden)

    def result(self) -> Tensor:
        assert self._sum is not None
        return (self._sum / self._count).float()


class _All(_Pooling):
    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def add(self, hidden: Tensor) -> None:
        self._chunks.append(hidden.to(torch.float32, copy=True))

    def result(self) -> Tensor:
        return torch.cat(self._chunks)


_KINDS: dict[str, type[_Pooling]] = {"last": _Last, "cls": _First, "mean": _Mean, "all": _All}


class Pooler:
    """Keeps the pooled states of the pooling requests in the batch, by row of the request table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._rows: dict[int, _Pooling] = {}

    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        """Follow the rows of the table: some were freed, then some were filled."""
        for row in freed:
            self._rows.pop(row, None)
        for row in filled:
            task = self._table[row].task
            if isinstance(task, PoolingParams):
                self._rows[row] = _KINDS[task.kind]()

    @property
    def rows(self) -> Collection[int]:
        """Rows of pooling requests."""
        return self._rows

    def pool(self, hidden: Tensor, span: Span) -> PooledArray | None:
        """Add the hidden states (span.count, hidden) of a span of one of `rows`; the array once it is complete."""
        state = self._rows[span.row]
        state.add(hidden)
        return state.result().cpu().numpy() if span.length == self._table[span.row].prompt_len else None

"""The interface of logits processors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.request_table import RequestTable


class RowState(Protocol):
    """State of the rows that use a sampling parameter.

    An exception of `add` or `observe` fails the row's sequence; the other rows continue.
    """

    @property
    def rows(self) -> Collection[int]:
        """Rows of the request table that use it."""

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """A sequence was put into a row; its known tokens are in the table."""

    def remove(self, row: int) -> None:
        """A row was freed."""

    def observe(self, row: int, token: int) -> None:
        """A token was sampled for one of `rows`."""


class LogitsProcessor(RowState, Protocol):
    """Change the logits of the rows that use it, before a token is chosen. An exception fails the row's sequence."""

    def apply(self, logits: Tensor, row: int, table: RequestTable) -> None:
        """Change the logits (vocab,) float32 of one of `rows` in place."""

"""Products of adapters (LoRA) that are added to the results of linear layers, on GPUs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SortedRows(NamedTuple):
    """Rows in the order of their adapters, for all products of a step.

    Attributes:
        order: (rows,) int32, of which only rows with an adapter are there.
        totals: (adapters,) int32 rows of each adapter.
    """

    order: Tensor
    totals: Tensor


def sort_rows(lora_ids: Tensor, count: int) -> SortedRows:
    """Sort rows by adapter, without waiting for the device.

    Args:
        lora_ids: (rows,) integers: the adapter of each row; -1: none.
        count: number of adapters.
    """
    from quire.kernels.triton.lora import sort_rows as kernel

    return SortedRows(*kernel(lora_ids, count))


def add_lora(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, rows: SortedRows) -> Tensor:
    """y + B (A x) for rows with an adapter of weights A and B; y is changed.

    Which rows have which adapter is known to the device only, so a captured call can be replayed for any others.

    Args:
        y: (rows, size_out), last stride 1.
        x: (rows, size_in).
        lora_a: (adapters, rank, size_in).
        lora_b: (adapters, size_out, rank), times the adapters' scales. Ranks that an adapter does not have are zero.
        rows: see `sort_rows`.

    Returns:
        y.
    """
    from quire.kernels.triton.lora import add_lora as kernel

    return kernel(y, x if x.stride(1) == 1 else x.contiguous(), lora_a, lora_b, *rows)

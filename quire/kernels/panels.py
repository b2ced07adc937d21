"""Rows of 32-bit words as panels of 32 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty

PANEL = 32


def in_panels(words: Tensor) -> Tensor:
    """(rows, words) int32 as (panels, words, 32); rows that fill the last panel are 0."""
    rows, size = words.shape
    panels = torch.empty(-(-rows // PANEL), size, PANEL, dtype=torch.int32)
    whole = rows // PANEL
    panels[:whole] = words[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : rows - whole * PANEL] = words[whole * PANEL :].T
    return panels


def take_panel_rows(panels: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows (n,) int64 as numbers of a type: (n, words * 4 / its size)."""
    words = panels.shape[1]
    if native.instructions() is None:
        return panels[rows // PANEL, :, rows % PANEL].view(dtype)
    out = empty((len(rows), words * panels.itemsize // dtype.itemsize), dtype)
    native.kernels.take_rows(panels.data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), words, words, PANEL)
    return out

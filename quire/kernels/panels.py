"""Rows of 32-bit words in panels of 32 rows, which is how the kernels read weights."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty
from quire.kernels.huge_pages import empty_in_huge_pages

PANEL = 32


def pack_panels(words: Tensor) -> Tensor:
    """(rows, words) int32 as (panels, words, 32), in huge pages."""
    rows, size = words.shape
    panels = empty_in_huge_pages((-(-rows // PANEL), size, PANEL), torch.int32)
    write_panels(words, panels)
    return panels


def write_panels(words: Tensor, panels: Tensor) -> None:
    """Write (rows, words) int32 to panels (panels, words, 32), with rows of 0 at the end of the last one."""
    rows = len(words)
    whole = rows // PANEL
    panels[:whole] = words[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : rows - whole * PANEL] = words[whole * PANEL :].T


def take_panel_rows(panels: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by their indices (n,) int64, unpacked and viewed as `dtype`: (n, words * 4 / itemsize)."""
    if native.instructions() is None:
        return panels[indices // PANEL, :, indices % PANEL].view(dtype)
    out = empty((len(indices), panels.shape[1] * panels.itemsize // dtype.itemsize), dtype)
    native.kernels.take_panel_rows(panels=panels, indices=indices, out=out)
    return out

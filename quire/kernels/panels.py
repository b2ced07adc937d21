"""Rows of 32-bit words as panels of 32 rows."""

from __future__ import annotations

import torch
from torch import Tensor

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


def row_words(panels: Tensor, rows: Tensor) -> Tensor:
    """The words of some rows (n,): (n, words) int32."""
    return panels[rows // PANEL, :, rows % PANEL]

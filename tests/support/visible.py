"""Positions that queries attend to beside earlier ones, as the engine makes them for spans of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible_bounds(length: int, spans: Sequence[tuple[int, int]], *, ignores_windows: bool) -> Tensor:
    """(length, 2) int32 for all positions of a sequence, of which those of `spans` attend to each other."""
    bounds = torch.stack((torch.arange(length), torch.arange(length) + 1), 1)
    for start, end in spans:
        bounds[start:end, 1] = end
        if ignores_windows:
            bounds[start:end, 0] = start
    return bounds.int()


def visible_mask(bounds: Tensor, window: int | None) -> Tensor:
    """(length, length): which positions each one attends to."""
    length = len(bounds)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    before = (key <= query) & (key > query - (length if window is None else window))
    begin, end = bounds[:, :1], bounds[:, 1:]
    return before | ((key >= begin) & (key < end))

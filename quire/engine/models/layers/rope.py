"""CosSin of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.engine.models.spec import DynamicNtk, LongRope, Rope
from quire.kernels.qk_norm_rope import CosSin
from quire.kernels.take_rows import take_rows

_CHUNK = 1 << 14  # positions of a table computed at a time


def cos_sin(rope: Rope, positions: Tensor, context_len: int) -> CosSin:
    """Cosines and sines at positions (tokens,).

    `context_len` chooses between the two frequency sets of a long rope: one choice for all requests, so that they can
    share cached keys.
    """
    phase = positions.float()[:, None] * _frequencies(rope, positions, context_len)
    return CosSin(phase.cos() * rope.factor, phase.sin() * rope.factor, rope.interleaved)


class RopeTables:
    """Cosines and sines of all positions of a context, for each of a model's ropes."""

    def __init__(self, ropes: Iterable[Rope], context_len: int, device: torch.device) -> None:
        self._tables = {rope: _table(rope, context_len, device) for rope in ropes}

    def at(self, positions: Tensor) -> dict[Rope, CosSin]:
        """Cosines and sines at positions (tokens,)."""
        return {
            rope: CosSin(take_rows(table.cos, positions), take_rows(table.sin, positions), table.interleaved)
            for rope, table in self._tables.items()
        }


def _table(rope: Rope, context_len: int, device: torch.device) -> CosSin:
    cos, sin = (torch.empty(context_len, len(rope.inv_freq), device=device) for _ in range(2))
    for begin in range(0, context_len, _CHUNK):
        end = min(context_len, begin + _CHUNK)
        chunk = cos_sin(rope, torch.arange(begin, end, device=device), context_len)
        cos[begin:end], sin[begin:end] = chunk.cos, chunk.sin
    return CosSin(cos, sin, rope.interleaved)


def _frequencies(rope: Rope, positions: Tensor, context_len: int) -> Tensor:
    """(pairs,) or (tokens, pairs)."""
    extension = rope.extension
    if isinstance(extension, LongRope) and context_len > extension.trained_len:
        return torch.tensor(extension.inv_freq, dtype=torch.float32, device=positions.device)
    if isinstance(extension, DynamicNtk):
        return _dynamic_ntk(rope.dim, extension, positions)
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)


def _dynamic_ntk(dim: int, ntk: DynamicNtk, positions: Tensor) -> Tensor:
    """Frequencies as for a sequence that ends at each position, so that chunking does not change the result."""
    length = (positions + 1).clamp(min=ntk.trained_len).float()
    stretch = ntk.factor * length / ntk.trained_len - (ntk.factor - 1)
    base = ntk.theta * stretch ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, device=positions.device).float() / dim
    return 1.0 / base[:, None] ** exponent

"""CosSin of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.engine.models.spec import DynamicNtk, LongRope, Rope
from quire.kernels.qk_norm_rope import CosSin
from quire.kernels.take_rows import take_rows

_AT_ONCE = 1 << 14  # positions of a table that are computed together


def angles(rope: Rope, positions: Tensor, context_len: int) -> CosSin:
    """Cosine and sine at the given positions (tokens,).

    `context_len` decides between a long rope's two frequency sets, so that it is one for all requests and their keys
    can be shared.
    """
    phase = positions.float()[:, None] * _frequencies(rope, positions, context_len)
    return CosSin(phase.cos() * rope.factor, phase.sin() * rope.factor, rope.interleaved)


class RopeTables:
    """The angles of all positions of a context, for each of a model's ropes."""

    def __init__(self, ropes: Iterable[Rope], context_len: int) -> None:
        self._tables = {rope: _table(rope, context_len) for rope in ropes}

    def at(self, positions: Tensor) -> dict[Rope, CosSin]:
        """Of the given positions (tokens,)."""
        return {
            rope: CosSin(take_rows(table.cos, positions), take_rows(table.sin, positions), table.interleaved)
            for rope, table in self._tables.items()
        }


def _table(rope: Rope, context_len: int) -> CosSin:
    cos, sin = (torch.empty(context_len, len(rope.inv_freq)) for _ in range(2))
    for begin in range(0, context_len, _AT_ONCE):
        some = slice(begin, min(context_len, begin + _AT_ONCE))
        made = angles(rope, torch.arange(some.start, some.stop), context_len)
        cos[some], sin[some] = made.cos, made.sin
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
    """Each position turns as in a sequence that ends with it, so the result is the same however it is chunked."""
    length = (positions + 1).clamp(min=ntk.trained_len).float()
    stretch = ntk.factor * length / ntk.trained_len - (ntk.factor - 1)
    base = ntk.theta * stretch ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, device=positions.device).float() / dim
    return 1.0 / base[:, None] ** exponent

"""CosSin of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.engine.models.specs.decoder import QueryTemperature
from quire.engine.models.specs.rope import DynamicNtk, LongRope, Rope
from quire.kernels.projected_heads import CosSin
from quire.kernels.take_rows import take_rows

_CHUNK = 1 << 14  # positions of a table computed at a time


def rope_switch(ropes: Iterable[Rope], context_len: int) -> int | None:
    """Longest sequence with LongRoPE's short factors; None if all sequences have them.

    `check_spec` has made sure that it is the same for all ropes.
    """
    lengths = {rope.extension.trained_len for rope in ropes if isinstance(rope.extension, LongRope)}
    return next((length for length in lengths if length < context_len), None)


def cos_sin(rope: Rope, positions: Tensor, *, long_rope: bool = False) -> CosSin:
    """Cosines and sines at positions (tokens,).

    `long_rope`: with a long rope's frequencies for sequences beyond the trained length.
    """
    phase = positions.float()[:, None] * _frequencies(rope, positions, long_rope=long_rope)
    return CosSin(phase.cos() * rope.factor, phase.sin() * rope.factor, rope.interleaved)


class RopeTables:
    """Cosines and sines of all positions of a context, for each of a model's ropes.

    With a switch the positions below it are followed by all positions again, for sequences that are longer.
    """

    def __init__(self, ropes: Iterable[Rope], context_len: int, switch: int | None, device: torch.device) -> None:
        self._tables = {rope: _table(rope, context_len, switch, device) for rope in ropes}

    def at(self, positions: Tensor) -> dict[Rope, CosSin]:
        """Cosines and sines at rows of the tables, (tokens,) or (3, tokens): see `ModelInputs.positions`."""
        if positions.dim() > 1:
            return {rope: _at_three(rope, table, positions) for rope, table in self._tables.items()}
        return {
            rope: CosSin(take_rows(table.cos, positions), take_rows(table.sin, positions), table.interleaved)
            for rope, table in self._tables.items()
        }


class QueryFactors:
    """The factors of queries at all positions of a context, for each of a model's temperatures."""

    def __init__(
        self, temperatures: Iterable[QueryTemperature], context_len: int, switch: int | None, device: torch.device
    ) -> None:
        """Make them at the rows that `RopeTables` has; `switch`: see there."""
        positions = torch.arange(context_len, device=device)
        if switch is not None:
            positions = torch.cat((positions[:switch], positions))
        self._tables = {each: query_factors(each, positions) for each in temperatures}

    def at(self, positions: Tensor) -> dict[QueryTemperature, Tensor]:
        """(tokens, 1) float32 factors at rows (tokens,), or (3, tokens), of which the first counts."""
        first = positions if positions.dim() == 1 else positions[0]
        return {each: take_rows(table, first) for each, table in self._tables.items()}


def query_factors(temperature: QueryTemperature, positions: Tensor) -> Tensor:
    """(tokens, 1) float32 factors of the queries at positions (tokens,)."""
    growth = torch.log1p(((positions + temperature.offset) // temperature.length).float())
    return (1 + temperature.growth * growth)[:, None]


def _at_three(rope: Rope, table: CosSin, positions: Tensor) -> CosSin:
    """Cosines and sines of tokens with three positions each."""
    axes = torch.tensor(rope.axes or (0,) * len(rope.inv_freq), device=positions.device)
    rows, pairs = positions[axes].T, torch.arange(len(axes), device=positions.device)
    cos, sin = (values[rows, pairs].contiguous() for values in (table.cos, table.sin))
    return CosSin(cos, sin, table.interleaved)


def _table(rope: Rope, context_len: int, switch: int | None, device: torch.device) -> CosSin:
    parts = [(context_len, False)] if switch is None else [(switch, False), (context_len, True)]
    cos, sin = (torch.empty(sum(count for count, _ in parts), len(rope.inv_freq), device=device) for _ in range(2))
    row = 0
    for count, long_rope in parts:
        for begin in range(0, count, _CHUNK):
            positions = torch.arange(begin, min(count, begin + _CHUNK), device=device)
            chunk = cos_sin(rope, positions, long_rope=long_rope)
            rows = slice(row, row + len(positions))
            cos[rows], sin[rows] = chunk.cos, chunk.sin
            row += len(positions)
    return CosSin(cos, sin, rope.interleaved)


def _frequencies(rope: Rope, positions: Tensor, *, long_rope: bool) -> Tensor:
    """(pairs,) or (tokens, pairs)."""
    extension = rope.extension
    if isinstance(extension, LongRope) and long_rope:
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

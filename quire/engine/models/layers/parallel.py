"""Layers of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.linear import Linear
from quire.kernels.streams import keep_largest


class RowParallelLinear(Linear):
    """A linear layer of which each rank has some inputs; the results of the ranks are summed.

    Only the first rank has the bias; on others it is 0.
    """

    def __init__(self, size_in: int, size_out: int, group: RankGroup, *, bias: bool = False) -> None:
        """`size_in`: inputs of this rank."""
        super().__init__(size_in, size_out, bias=bias)
        self._group = group

    @override
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self._group.all_reduce(super().forward(x, **options))


def row_parallel(size_in: int, size_out: int, group: RankGroup | None, *, bias: bool = False) -> Linear:
    """A linear layer whose inputs are divided among the ranks of a group; None: it has all of them."""
    if group is None:
        return Linear(size_in, size_out, bias=bias)
    return RowParallelLinear(size_in, size_out, group, bias=bias)


def normalize_over_ranks(parts: Sequence[Tensor], eps: float, group: RankGroup) -> list[Tensor]:
    """Divide rows by the root of the mean of their squares.

    Args:
        parts: (rows, columns) float32 each; of each row a rank has some columns, all ranks as many.
        eps: added to the means.
        group: the ranks.
    """
    # In float64, as torch's sums of one row and of several have other orders.
    sums = torch.cat([part.double().square().sum(1, keepdim=True) for part in parts], 1).float()
    sums = group.all_reduce(sums)
    return [
        part * torch.rsqrt(sums[:, index : index + 1] / (part.shape[1] * group.size) + eps)
        for index, part in enumerate(parts)
    ]


def keep_largest_over_ranks(x: Tensor, deviations: float, group: RankGroup | None) -> None:
    """Do what `keep_largest` does, with rows (rows, columns) of which each rank of a group has some columns.

    Each rank computes all columns, so the results have the bits of one rank.
    """
    if group is None:
        keep_largest(x, deviations)
        return
    columns = torch.cat(tuple(group.all_gather(x)), 1)
    keep_largest(columns, deviations)
    x.copy_(columns.chunk(group.size, 1)[group.rank])


class VocabParallelEmbedding(Embedding):
    """An embedding table of which each rank has some rows; tokens of other ranks are 0 before the ranks are summed."""

    def __init__(self, vocab: int, hidden: int, group: RankGroup, tied: Linear | None = None) -> None:
        """`vocab`: rows of this rank."""
        super().__init__(vocab, hidden, tied)
        self._vocab = vocab
        self._group = group

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        local_ids = tokens - self._group.rank * self._vocab
        absent = (local_ids < 0) | (local_ids >= self._vocab)
        rows = super().forward(local_ids.clamp(0, self._vocab - 1))
        return self._group.all_reduce(rows.masked_fill(absent[:, None], 0))

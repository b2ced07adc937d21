"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear, Packable
from quire.kernels.linear import PackedBFloat16, Quantization
from quire.kernels.take_rows import take_rows


class Embedding(Packable):
    """Rows of a table, which a tied head multiplies with. Where that keeps it whole in panels, they serve both."""

    def __init__(self, vocab: int, hidden: int, tied: Linear | None = None) -> None:
        """`tied`: the head that shares the table."""
        super().__init__()
        # Not nn.Embedding, which fills its table: on the meta device that imports a second's worth of torch.
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)
        self._tied = () if tied is None else (tied,)  # in a tuple, as it is no part of this module
        if tied is not None:
            tied.weight = self.weight

    def pack_weights(self, quantization: Quantization) -> None:
        """See `Packable`."""
        for head in self._tied:
            head.pack_weights(quantization)
        if self._panels is not None:
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        """See `Packable`; panels count as the head's."""
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        """(tokens,) ids to (tokens, hidden)."""
        if self._panels is not None:
            return self._panels.rows(tokens)
        assert self.weight is not None
        return take_rows(self.weight, tokens)

    @property
    def _panels(self) -> PackedBFloat16 | None:
        found = [head.panels for head in self._tied if isinstance(head.panels, PackedBFloat16)]
        return found[0] if found else None

"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear, Packable
from quire.kernels.linear import PackedBFloat16, Quantization
from quire.kernels.take_rows import take_rows


class Embedding(Packable):
    """An embedding table, which a tied head multiplies with. If the head's packed weight is exact, it serves both."""

    def __init__(self, vocab: int, hidden: int, tied: Linear | None = None) -> None:
        """`tied`: the head that shares the table."""
        super().__init__()
        # Not nn.Embedding: it initializes its table, which on the meta device imports a second's worth of torch.
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)
        self._tied = () if tied is None else (tied,)  # in a tuple: not a submodule of this one
        if tied is not None:
            tied.weight = self.weight

    def pack_weights(self, quantization: Quantization) -> None:
        """Pack the tied head."""
        for head in self._tied:
            head.pack_weights(quantization)
        if self._shared is not None:
            self.weight = None

    @property
    def packed_bytes(self) -> int:
        """0: a shared packed weight counts as the head's."""
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        """(tokens,) ids to (tokens, hidden)."""
        if self._shared is not None:
            return self._shared.rows(tokens)
        assert self.weight is not None
        return take_rows(self.weight, tokens)

    @property
    def _shared(self) -> PackedBFloat16 | None:
        """The head's packed weight, if rows of the table can be read from it without loss."""
        found = [head.packed for head in self._tied if isinstance(head.packed, PackedBFloat16)]
        return found[0] if found else None

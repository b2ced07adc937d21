"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.inputs import ModelInputs
from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.specs.decoder import TransformerSpec
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.linear import ExactWeight, PackedTable, PackedWeight, Quantization
from quire.kernels.take_rows import take_rows


class EmbeddingSum(nn.Module):
    """Add embeddings of positions and token types to those of tokens; then a norm, and a projection."""

    derived_from_weights = ("_sums",)  # made when first needed

    def __init__(self, model: TransformerSpec) -> None:
        super().__init__()
        spec = model.embeddings
        size = spec.size or model.hidden
        self.spec = spec
        self.positions = _table(spec.positions, size)
        self.types = _table(spec.types, size)
        self.tasks = _table(spec.tasks, size)
        normed = model.hidden if spec.norm_projected else size
        self.norm = None if spec.norm is None else make_norm(normed, spec.norm)
        self._sums: Tensor | None = None
        self.project = None if spec.size is None else Linear(spec.size, model.hidden, bias=not spec.norm_projected)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """(tokens, size) to (tokens, hidden)."""
        x = scaled(x, self.spec.scale)
        added = self._added(inputs)
        if self.project is not None and self.spec.norm_projected:
            x, added = self.project(x if added is None else add_scaled(x, added)), None
        if self.norm is not None:
            x = self.norm(x, added)
        elif added is not None:
            x = add_scaled(x, added)
        return x if self.project is None or self.spec.norm_projected else self.project(x)

    def _added(self, inputs: ModelInputs) -> Tensor | None:
        """The embeddings of positions and token types, summed: (tokens, size)."""
        if self.positions is None and self.types is None:
            return None
        if self._sums is None:
            self._sums = self._make_sums()
        rows = None if self.positions is None else inputs.positions
        if self.types is not None and inputs.type_ids is not None:
            types = inputs.type_ids * (len(self._sums) // len(self.types))
            rows = types if rows is None else rows + types
        return take_rows(self._sums, torch.zeros_like(inputs.token_ids) if rows is None else rows)

    def _make_sums(self) -> Tensor:
        """(types * positions, size): a sum for each token type and position, so that a step gathers once."""
        positions = None if self.positions is None else self.positions.data[self.spec.position_offset :]
        if positions is not None and self.tasks is not None:
            positions = positions + self.tasks[0]
        if positions is None or self.types is None:
            table = self.types if positions is None else positions
            assert table is not None
            return table.data
        return (self.types[:, None] + positions).flatten(0, 1)


def _table(rows: int, size: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(rows, size), requires_grad=False) if rows else None


class Embedding(Packable):
    """An embedding table, which a tied head multiplies with. A packed head whose rows can be read is both.

    So is a weight that was packed as the checkpoint stores it, of a table with or without a head.
    """

    def __init__(self, vocab: int, hidden: int, tied: Linear | None = None) -> None:
        """`tied`: the head that shares the table."""
        super().__init__()
        # Not nn.Embedding: it initializes its table, which on the meta device imports a second's worth of torch.
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)
        self.packed: PackedTable | None = None
        self._tied = () if tied is None else (tied,)  # in a tuple: not a submodule of this one
        if tied is not None:
            tied.weight = self.weight

    def pack_weights(self, quantization: Quantization) -> None:
        """Pack the tied head."""
        for head in self._tied:
            head.pack_weights(quantization)
            if isinstance(head.packed, ExactWeight) or (head.packed is not None and self.can_use(head.packed)):
                self.use(head.packed)

    def can_use(self, packed: PackedWeight) -> bool:
        return not self.is_exact and isinstance(packed, PackedTable)

    def use(self, packed: PackedWeight | None) -> None:
        if packed is not None:
            assert isinstance(packed, PackedTable)
            self.packed, self.weight = packed, None

    @property
    def packed_bytes(self) -> int:
        """0 with a head: a shared packed weight counts as the head's."""
        return 0 if self.packed is None or self._tied else self.packed.nbytes

    def forward(self, tokens: Tensor) -> Tensor:
        """(tokens,) ids to (tokens, hidden)."""
        if self.packed is not None:
            return self.packed.rows(tokens)
        assert self.weight is not None
        return take_rows(self.weight, tokens)

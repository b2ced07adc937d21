"""Inputs of layers beside the hidden state: an embedding of the token for each layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.inputs import ItemEmbeddings
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import Norm, StackSpec
from quire.engine.models.specs.layer_inputs import LayerEmbeddings, LayerInput
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.capture import split_heads
from quire.kernels.copy_rows import limit_ids
from quire.kernels.multiply import multiply
from quire.kernels.take_rows import take_rows


class LayerEmbeddingTable(nn.Module):
    """The inputs of all layers; see `LayerEmbeddings`."""

    def __init__(self, spec: LayerEmbeddings, hidden: int, layers: int, norm: Norm, vocab: int) -> None:
        """`vocab`: tokens of the model."""
        super().__init__()
        self._spec, self._hidden, self._layers = spec, hidden, layers
        self._has_all_tokens = spec.vocab >= vocab
        self.table = Embedding(spec.vocab, layers * spec.size)
        self.projection = Linear(hidden, layers * spec.size)
        self.norm = make_norm(spec.size, norm)

    def forward(self, token_ids: Tensor, embedded: Tensor, items: ItemEmbeddings | None) -> Tensor:
        """(tokens,) ids and (tokens, hidden), the input of the first layer, to (tokens, layers * size).

        `items`: those that are in it.
        """
        size = self._spec.size
        if items is not None and not items.added:
            token_ids = token_ids.index_fill(0, items.rows, self._spec.item_token)
        ids = token_ids if self._has_all_tokens else limit_ids(token_ids, self._spec.vocab)
        projected = scaled(self.projection(embedded), self._hidden**-0.5)
        normed = self.norm(split_heads(projected, self._layers, size)).view(projected.shape)
        return scaled(add_scaled(normed, scaled(self.table(ids), size**0.5)), 2**-0.5)


class LayerInputGate(nn.Module):
    """The part of a layer that reads its input; see `LayerInput`."""

    def __init__(self, index: int, spec: LayerInput, model: StackSpec) -> None:
        super().__init__()
        self._spec, self._columns = spec, slice(index * spec.size, (index + 1) * spec.size)
        self.gate = Linear(model.hidden, spec.size)
        self.projection = Linear(spec.size, model.hidden)
        self.norm = make_norm(model.hidden, model.norm)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """What is added to x (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.layer_inputs is not None
        inputs = step.layer_inputs[:, self._columns]
        if last_layer and step.last_token_only and step.logits_indices is not None:
            inputs = take_rows(inputs, step.logits_indices)
        added: Tensor = self.norm(self.projection(multiply(self.gate(x, act=self._spec.act), inputs)))
        return added


class OutputScale(nn.Module):
    """A learned factor."""

    derived_from_weights = ("_scale",)  # made when first needed

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(1), requires_grad=False)
        self._scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) times the factor."""
        if self._scale is None:
            self._scale = self.factor.item()
        return scaled(x, self._scale)

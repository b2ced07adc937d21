"""The values that a step passes to every layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from quire.engine.models.layers.inputs import (
    NO_LORA,
    ItemEmbeddings,
    KeysAndValues,
    LoRAIds,
    SelectedPositions,
    StepAttention,
    StepCrossAttention,
    StepStates,
)
from quire.engine.models.layers.linear import LoRARows
from quire.engine.models.specs.decoder import QueryTemperature
from quire.engine.models.specs.rope import Rope
from quire.kernels import gpu
from quire.kernels.lora import sort_rows
from quire.kernels.projected_heads import CosSin
from quire.kernels.take_rows import take_rows


@dataclass(frozen=True, slots=True)
class StepLoRA:
    """The rows of a step by adapter, as layers read them; see `LoRAIds`."""

    tokens: LoRARows
    logits: LoRARows

    @classmethod
    def of(cls, ids: LoRAIds | None, num_adapters: int) -> StepLoRA | None:
        """Sort the rows of a step, once for all layers. `num_adapters`: those of the model."""
        if ids is None:
            return None
        tokens = _rows(ids.tokens, ids.only, num_adapters)
        return cls(tokens, tokens if ids.logits is None else _rows(ids.logits, ids.only, num_adapters))


def _rows(ids: Tensor, only: int | None, num_adapters: int) -> LoRARows:
    if only is not None:
        return {only: None}
    if gpu.supports(ids):
        return sort_rows(ids, num_adapters)
    return {lora_id: (ids == lora_id).nonzero().flatten() for lora_id in ids.unique().tolist() if lora_id != NO_LORA}


@dataclass(frozen=True, slots=True)
class StepContext:
    """Cosines and sines of the step's positions by rope, and its attention.

    Attributes:
        logits_indices: see `ModelInputs`.
        last_token_only: the last layer computes only the rows `logits_indices`.
        cu_seqlens: see `ModelInputs`.
        relative_bias: see `AttentionParams.bias`.
        relative_positions: (rows, hidden) the table that `DisentangledAttentionLayer` reads.
        cross: the step's cross-attention; None in models without it.
        lora: rows that adapters apply to; None: none.
        states: the states of sequences; None in models without them, also those that encode audio whole.
        chunk_mask: (chunks, positions) bool: the positions that each chunk of a `ChunkedAttention` can attend to exist.
        items: see `ModelInputs`.
        query_factors: (tokens, 1) factors of the queries of layers that have a temperature.
        selected: see `Selection`.
        positions: see `ModelInputs`.
        embedded: (tokens, hidden) the input of the first layer, in models with other layers that read it.
        layer_inputs: (tokens, layers * size) the inputs of layers, see `LayerEmbeddings`; None: they have none.
        stored: by the index of a layer's cache, the keys and values that layers of later pipeline stages read.
    """

    ropes: dict[Rope, CosSin]
    attend: StepAttention
    logits_indices: Tensor | None = None
    last_token_only: bool = False
    cu_seqlens: Tensor | None = None
    relative_bias: Tensor | None = None
    relative_positions: Tensor | None = None
    cross: StepCrossAttention | None = None
    lora: StepLoRA | None = None
    states: StepStates | None = None
    chunk_mask: Tensor | None = None
    items: ItemEmbeddings | None = None
    query_factors: dict[QueryTemperature, Tensor] = field(default_factory=dict)
    selected: SelectedPositions = field(default_factory=SelectedPositions)
    positions: Tensor | None = None
    embedded: Tensor | None = None
    layer_inputs: Tensor | None = None
    stored: dict[int, KeysAndValues] = field(default_factory=dict)

    def of_logits_rows(self, attend: StepAttention) -> StepContext:
        """The step of the rows `logits_indices` alone, for layers that keep nothing of a sequence.

        `attend`: the attention of these rows.
        """
        rows = self.logits_indices
        assert rows is not None
        return replace(
            self,
            ropes={
                rope: CosSin(take_rows(values.cos, rows), take_rows(values.sin, rows), values.interleaved)
                for rope, values in self.ropes.items()
            },
            attend=attend,
            logits_indices=None,
            last_token_only=False,
            lora=None if self.lora is None else StepLoRA(self.lora.logits, self.lora.logits),
            items=None,
            positions=None,  # those that keep something read them
            query_factors={each: take_rows(factors, rows) for each, factors in self.query_factors.items()},
            layer_inputs=None if self.layer_inputs is None else take_rows(self.layer_inputs, rows),
        )

    def lora_rows(self, *, last_layer: bool) -> LoRARows | None:
        """The rows of the tokens behind a layer's attention that adapters apply to; None: none."""
        if self.lora is None:
            return None
        only_logits = last_layer and self.last_token_only and self.logits_indices is not None
        return self.lora.logits if only_logits else self.lora.tokens

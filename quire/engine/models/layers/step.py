"""The values that a step passes to every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.engine.models.layers.inputs import (
    AdaptedRows,
    AdapterOfRow,
    LoRARows,
    RowSet,
    StepAttention,
    StepCrossAttention,
    StepStates,
)
from quire.engine.models.layers.pieces import Pieces
from quire.engine.models.specs.rope import Rope
from quire.kernels.projected_heads import CosSin


@dataclass(frozen=True, slots=True)
class StepLoRA:
    """The rows that the adapter applies to, as layers read them; see `LoRARows`."""

    tokens: AdaptedRows
    logits: AdaptedRows | None

    @classmethod
    def of(cls, lora: LoRARows | None) -> StepLoRA | None:
        """Those of a step. Where the device sorts rows it does so once, for all layers."""
        return None if lora is None else cls(_rows(lora.tokens), None if lora.logits is None else _rows(lora.logits))


def _rows(rows: RowSet | AdapterOfRow) -> AdaptedRows:
    return rows.sorted() if isinstance(rows, AdapterOfRow) else rows


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
        lora: rows that the model's LoRA adapter applies to; None: none.
        states: the states of sequences; None in models without them.
        pieces: the pieces of audio of the step; None in models that encode audio whole.
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
    pieces: Pieces | None = None

    def lora_rows(self, *, last_layer: bool) -> AdaptedRows | None:
        """Those of the tokens behind a layer's attention; None if the adapter applies to none of them."""
        if self.lora is None:
            return None
        only_logits = last_layer and self.last_token_only and self.logits_indices is not None
        return self.lora.logits if only_logits else self.lora.tokens

"""The input of a model for one step, and the attention functions that its layers call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.paged_attention import AttentionParams
from quire.kernels.projected_heads import ProjectedHeads
from quire.kernels.qk_norm_rope import qk_norm_rope

NO_LORA = -1  # the id of no adapter


@dataclass(frozen=True, slots=True)
class ItemEmbeddings:
    """Embeddings that replace embeddings of placeholder tokens, or are added to embeddings of tokens.

    Attributes:
        rows: (n,) int64 indices of the tokens.
        values: (n, hidden), or (n, hidden * (1 + levels)): the k-th level is added to the hidden states of the tokens
            behind the k-th layer (DeepStack).
        added: they are added; otherwise they replace.
    """

    rows: Tensor
    values: Tensor
    added: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """(tokens, hidden), the embeddings of all tokens of a step."""
        values = self.values[:, : x.shape[1]]
        return x.index_add(0, self.rows, values) if self.added else x.index_copy(0, self.rows, values)

    def add_level(self, level: int, x: Tensor) -> Tensor:
        """Add a level, counted from 0, to the hidden states (tokens, hidden), if there is such a one."""
        begin = (1 + level) * x.shape[1]
        if begin >= self.values.shape[1]:
            return x
        return x.index_add(0, self.rows, self.values[:, begin : begin + x.shape[1]])


@dataclass(frozen=True, slots=True)
class LoRAIds:
    """The adapter (LoRA) of each row of a step: its id, or `NO_LORA`.

    Attributes:
        tokens: (tokens,) int32 adapters of the tokens.
        logits: the same of the rows `logits_indices`; None if these are all rows.
        only: the adapter that all rows have; None if they have several, or if only the device knows which.
    """

    tokens: Tensor
    logits: Tensor | None
    only: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The tokens of all sequences of a step, concatenated.

    Attributes:
        token_ids: (tokens,) int64.
        positions: (tokens,) int64 position of each token in its sequence; in one that is longer than the model's
            `rope_switch`, that is added. In steps that read prompts with pictures whose tokens have rotary positions of
            time, height and width, these: (3, tokens).
        logits_indices: (n,) int64 rows of the last tokens of sequences that sample from them alone; None if these are
            all rows.
        type_ids: (tokens,) int64 token types; None for models without any.
        cu_seqlens: (sequences + 1,) int64 on the host, for encoders: the first token of each sequence, and the number
            of tokens.
        items: embeddings of the tokens that stand for items, or that audio is added to; None if there are none.
        lora_ids: adapters of the tokens; None if no token has one.
        states: the states of the sequences; None in models without them.
    """

    token_ids: Tensor
    positions: Tensor
    logits_indices: Tensor | None = None
    type_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    items: ItemEmbeddings | None = None
    lora_ids: LoRAIds | None = None
    states: StepStates | None = None

    @property
    def is_replayable(self) -> bool:
        """Whether all inputs may be at fixed addresses, so that captured steps can read them."""
        return self.items is None and self.positions.dim() == 1


class StepStates(Protocol):
    """The states of the sequences of one step, in slots. Those of a sequence that begins are zero.

    Layers of decoders change them where they are (`arrays`). Where a sequence cannot be computed again, because its
    audio is not kept, layers read copies and write them: these are stored when the whole step has succeeded.

    Attributes:
        ranges: the tokens [begin, end) of each sequence among those of the step.
        slots: (sequences,) int64 the slot of each sequence, on the device. On the host at the same address in all
            steps, like `cu_seqlens`, so that kernel calls with them can be replayed.
        cu_seqlens: (sequences + 1,) int64 on the host, the first token of each sequence, and the number of tokens.
    """

    ranges: Sequence[tuple[int, int]]
    slots: Tensor
    cu_seqlens: Tensor

    def arrays(self, layer: int) -> list[Tensor]:
        """Return each array (slots, *shape) of a layer's states, contiguous within a slot, to be changed in place."""

    def read(self, layer: int) -> list[Tensor]:
        """Return a copy of each array (sequences, *shape) of a layer's states before the step."""

    def write(self, layer: int, arrays: Sequence[Tensor]) -> None:
        """Replace a layer's states by those behind the step's tokens, when the step has succeeded."""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What an indexer scores the tokens of a sequence with; see `Indexer`.

    Attributes:
        queries: (tokens, heads, dim).
        weights: (tokens, heads) float32.
    """

    queries: Tensor
    weights: Tensor


@dataclass(slots=True)
class SelectedPositions:
    """What the last layer with an indexer has selected.

    Attributes:
        rows: (tokens, top_k) int32 positions of each token of the step; None: nothing so far, or all tokens attend to
            all earlier ones.
    """

    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens that those of a step attend to.

    Attributes:
        top_k: number of tokens.
        key_dim: elements of the cached keys behind which the indexer's keys lie.
        queries: makes what they are selected with, if it is needed; None: they are those in `positions`.
        positions: those of the selected tokens, which layers pass on.
    """

    top_k: int
    key_dim: int
    queries: Callable[[], IndexQueries] | None
    positions: SelectedPositions


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """What a layer has stored of the tokens of a step: (tokens, kv_heads, dim) each."""

    keys: Tensor
    values: Tensor


class StepAttention(Protocol):
    """The attention of one step: stores a layer's new keys and values, then attends to all of a sequence's."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        """Attend causally.

        Args:
            layer: index of the layer's cache.
            q: (tokens, heads, dim).
            k: (tokens, kv_heads, dim).
            v: (tokens, kv_heads, value_dim); None where values are the first elements of the keys.
            params: scale, window, softcap, sinks.
            last_layer: this is the model's last layer. The rows `logits_indices` then attend one by one, as in a
                decode step, so that their results do not depend on the other rows.
            last_token_only: return the rows `logits_indices` only; in the last layer.

        Returns:
            (tokens, heads, value_dim), or (len(logits_indices), heads, value_dim).
        """

    def selected(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        params: AttentionParams,
        selection: Selection,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        """Attend as `__call__` does with keys that hold the values, to selected tokens where there are more.

        Without a cache there are never more.
        """
        return self(layer, q, k, None, params, last_layer=last_layer, last_token_only=last_token_only)

    def projected(
        self,
        layer: int,
        heads: ProjectedHeads,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        """Norm and rotate heads, then attend as `__call__` does. A cache may do both at once."""
        q, k, v = qk_norm_rope(heads)
        return self(layer, q, k, v, params, last_layer=last_layer, last_token_only=last_token_only)

    def read(
        self,
        layer: int,
        q: Tensor,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        """Attend to what an earlier layer of the step has stored; arguments and result: see `__call__`."""
        raise AssertionError(f"layer {layer} has no cache that several layers read ({type(self).__name__})")

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values that a layer of an earlier pipeline stage has computed; see `__call__`."""
        raise AssertionError(f"layer {layer} has no cache ({type(self).__name__})")

    def of_logits_rows(self) -> StepAttention | None:
        """Return the attention of the rows `logits_indices` alone, for layers that store nothing.

        None: these are all rows, or a result may depend on others.
        """
        return None


class StepCrossAttention(Protocol):
    """The cross-attention of one step: each token attends to all encoded positions of its sequence."""

    def __call__(self, layer: int, q: Tensor, params: AttentionParams, *, logits_rows: bool = False) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer's cache.
            q: (tokens, heads, dim).
            params: scale.
            logits_rows: q is of the rows `logits_indices` only.

        Returns:
            (tokens, heads, value_dim)
        """

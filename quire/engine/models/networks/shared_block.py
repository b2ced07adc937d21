"""Layers that have a block of attention and a feed-forward in common; see `BlockBeforeRecurrence`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.linear import Linear, LoRARows
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import Recurrence, StackSpec
from quire.engine.models.specs.shared_block import BlockBeforeRecurrence
from quire.kernels.add_scaled import add_scaled
from quire.kernels.copy_rows import contiguous_rows, join_columns

MakeRecurrence = Callable[[int, Recurrence, StackSpec, RankGroup | None], nn.Module]


class AdaptedLinear(nn.Module):
    """A linear layer that several layers have in common, plus two projections that one of them has, for each part.

    Attributes:
        base: the common layer.
        a: the first projections, as parts of one weight.
        b: the second ones.
    """

    def __init__(self, base: Linear, rank: int, *parts: Sequence[int]) -> None:
        """`parts`: outputs of each pair of projections, which may be of several projections of the common layer."""
        super().__init__()
        self.base, self.parts = base, base.parts
        self.a = Linear(base.size_in, *(rank for _ in parts))
        self.b = nn.ModuleList(Linear(rank, *sizes) for sizes in parts)

    def forward(self, x: Tensor, lora: LoRARows | None = None) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)). `lora`: see `Linear`."""
        inner = self.a(x).split(self.a.parts, 1)
        added = [project(contiguous_rows(part)) for project, part in zip(self.b, inner, strict=True)]
        return add_scaled(self.base(x, lora=lora), join_columns(added))


class BlockBeforeRecurrenceLayer(nn.Module):
    """A block of attention and a feed-forward, and a recurrence that reads what it adds."""

    def __init__(
        self,
        index: int,
        spec: BlockBeforeRecurrence,
        model: StackSpec,
        group: RankGroup | None,
        make_recurrence: MakeRecurrence,
    ) -> None:
        """`group`: ranks that have other parts of the layer; None: it is whole."""
        super().__init__()
        self.block = spec.block
        hidden = model.hidden
        self.attention = GroupedAttentionLayer(index, spec.attention, model, group)
        wide = Linear(2 * hidden, *self.attention.qkv.parts)
        if spec.attention_rank is not None:
            wide = _adapted(wide, spec.attention_rank, *((size,) for size in wide.parts))
        self.attention.qkv = wide
        self.ffn = GatedMLPLayer(hidden, spec.ffn.size, spec.ffn.act, bias=spec.ffn.bias, group=group)
        self.ffn.gate_up = _adapted(self.ffn.gate_up, spec.rank, self.ffn.gate_up.parts)
        self.attn_norm = make_norm(2 * hidden, model.norm)
        self.ffn_norm = make_norm(hidden, model.norm)
        self.linear = Linear(hidden, hidden)
        self.norm = make_norm(hidden, model.norm)
        self.recurrence = make_recurrence(index, spec.recurrence, model, group)

    def share(self, other: BlockBeforeRecurrenceLayer) -> None:
        """Take the weights of the block from an earlier layer."""
        for name in ("attn_norm", "ffn_norm"):
            setattr(self, name, getattr(other, name))
        self.attention.out, self.ffn.down = other.attention.out, other.ffn.down
        qkv, shared_qkv = cast("nn.Module", self.attention.qkv), cast("nn.Module", other.attention.qkv)
        if isinstance(qkv, AdaptedLinear) and isinstance(shared_qkv, AdaptedLinear):
            qkv.base = shared_qkv.base
        else:
            self.attention.qkv = other.attention.qkv
        gate_up, shared_gate_up = cast("nn.Module", self.ffn.gate_up), cast("nn.Module", other.ffn.gate_up)
        assert isinstance(gate_up, AdaptedLinear)
        assert isinstance(shared_gate_up, AdaptedLinear)
        gate_up.base = shared_gate_up.base

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.embedded is not None
        attended = self.attention(self.attn_norm(join_columns([x, step.embedded])), step)
        read = add_scaled(x, self.linear(self.ffn(self.ffn_norm(attended))))
        out: Tensor = self.recurrence(self.norm(read), step, last_layer=last_layer)
        return out


def share_blocks(layers: Iterable[nn.Module | None]) -> None:
    """Let layers with the same block have its weights in common.

    `layers`: what layers have in the place of attention.
    """
    first: dict[int, BlockBeforeRecurrenceLayer] = {}
    for layer in layers:
        if isinstance(layer, BlockBeforeRecurrenceLayer) and first.setdefault(layer.block, layer) is not layer:
            layer.share(first[layer.block])


def _adapted(base: Linear, rank: int, *parts: Sequence[int]) -> Linear:
    """An `AdaptedLinear`, in the place of a linear layer."""
    return cast("Linear", AdaptedLinear(base, rank, *parts))

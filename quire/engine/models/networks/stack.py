"""Layers and final norm of a `StackSpec`, which decoders and encoders share."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.conformer import ConformerBlock
from quire.engine.models.layers.cross_attention import CrossAttentionLayer
from quire.engine.models.layers.delta_net import DeltaNetLayer
from quire.engine.models.layers.disentangled_attention import DisentangledAttentionLayer
from quire.engine.models.layers.latent_attention import LatentAttentionLayer
from quire.engine.models.layers.layer_inputs import LayerInputGate, OutputScale
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.linear_recurrence import DecayingAttentionLayer, LinearRecurrenceLayer
from quire.engine.models.layers.mlp import GatedMLPLayer, LearnedMLPLayer, PlainMLPLayer
from quire.engine.models.layers.moe import MoELayer
from quire.engine.models.layers.norm import add_and_norm, make_norm
from quire.engine.models.layers.shared_keys import SharedKeysLayer
from quire.engine.models.layers.state_space import ChannelStateSpaceLayer, HeadStateSpaceLayer, ShortConvLayer
from quire.engine.models.layers.step import StepContext
from quire.engine.models.layers.streams import LayerStreams, SideBranch, StreamEnds
from quire.engine.models.networks.shared_block import BlockBeforeRecurrenceLayer, share_blocks
from quire.engine.models.specs.decoder import (
    Attention,
    ConformerLayer,
    DisentangledAttention,
    FeedForward,
    GatedMLP,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    LearnedMLP,
    MoE,
    NoAttention,
    NormedResidual,
    ParallelResidual,
    PlainMLP,
    SideBySide,
    StackSpec,
)
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.engine.models.specs.linear_recurrence import DecayingAttention, GatedLinearRecurrence
from quire.engine.models.specs.shared_block import BlockBeforeRecurrence
from quire.engine.models.specs.shared_keys import SharedKeysAttention
from quire.engine.models.specs.state_space import ChannelStateSpace, HeadStateSpace, ShortConvolution
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.capture import RowKind, set_row_kind
from quire.kernels.expert_calls import ExpertMemory
from quire.kernels.streams import add_to_streams
from quire.kernels.take_rows import take_rows

# Hidden sizes below which int4 is 6 bits for all weights of a layer, and for more of them than for the largest models.
_SMALL, _LARGE = 1536, 3072


class TransformerLayer(nn.Module):
    """Attention and feed-forward, and cross-attention where there is one, each in a residual branch."""

    def __init__(
        self,
        index: int,
        spec: Layer,
        model: StackSpec,
        source: int,
        group: RankGroup | None = None,
        memory: ExpertMemory | None = None,
    ) -> None:
        """Make the layer.

        Args:
            index: index of the layer's cache.
            spec: its architecture.
            model: that of the model.
            source: elements of a position that cross-attention reads.
            group: ranks that have other parts of the layer; None: it is whole.
            memory: what the experts of all layers work in.
        """
        super().__init__()
        self.scale = spec.residual_scale
        self.parallel = spec.parallel
        self.normed_residual = spec.normed_residual
        self.attn = None if isinstance(spec.attn, NoAttention) else _attention(index, spec.attn, model, group)
        self.ffn = None if spec.ffn is None else _feed_forward(spec.ffn, model, group, memory)

        def norm(exists: bool) -> nn.Module:
            return make_norm(model.hidden, model.norm) if exists else nn.Identity()

        self.attn_norm = norm(self.attn is not None and spec.pre_norm and spec.pre_attn_norm)
        norms_inside = isinstance(spec.ffn, MoE) and spec.ffn.branch_norms
        has_ffn_norm = self.ffn is not None and spec.pre_norm and not norms_inside
        self.ffn_norm = norm(has_ffn_norm and spec.parallel is not ParallelResidual.ONE_NORM)
        self.attn_output_norm, self.ffn_output_norm = norm(spec.branch_output_norm), norm(spec.branch_output_norm)
        self.attn_inner_post_ln = make_norm(model.hidden, model.norm) if spec.inner_post_ln else None
        self.attn_post_ln = make_norm(model.hidden, model.norm) if spec.post_ln else None
        self.ffn_post_ln = make_norm(model.hidden, model.norm) if spec.post_ln else None
        self.cross = None if spec.cross is None else CrossAttentionLayer(index, spec.cross, model.hidden, source)
        self.cross_norm = norm(spec.cross is not None)
        self.layer_input = None if spec.layer_input is None else LayerInputGate(index, spec.layer_input, model)
        self.output_scale = OutputScale() if spec.output_scale else None
        self.streams = None if spec.streams is None else LayerStreams(spec.streams, model.hidden, model.norm)
        self.side = None if spec.streams is None else SideBranch(spec.streams.rank, model)
        _give_six_bits(self, model.hidden)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        if self.streams is not None:
            return self._with_streams(x, self.streams, step, last_layer=last_layer)
        x = self._branches(x, step, last_layer=last_layer)
        if self.layer_input is not None:
            x = add_scaled(x, self.layer_input(x, step, last_layer=last_layer))
        return x if self.output_scale is None else self.output_scale(x)

    def _branches(self, x: Tensor, step: StepContext, *, last_layer: bool) -> Tensor:
        if self.attn is None or self.ffn is None:
            return self._one_branch(x, step, last_layer=last_layer)
        if self.normed_residual is not None:
            return self._with_normed_residual(x, self.normed_residual, step, last_layer=last_layer)
        rows = step.lora_rows(last_layer=last_layer)
        ffn = self.ffn if rows is None else partial(self.ffn, lora=rows)
        normed = self.attn_norm(x)
        attended = self.attn_output_norm(self.attn(normed, step, last_layer=last_layer))
        logits_rows = last_layer and step.last_token_only and step.logits_indices is not None
        if logits_rows:
            assert step.logits_indices is not None
            x, normed = take_rows(x, step.logits_indices), take_rows(normed, step.logits_indices)
        if self.parallel is not None:
            read = normed if self.parallel is ParallelResidual.ONE_NORM else self.ffn_norm(x)
            return add_scaled(x, add_scaled(attended, ffn(read)))
        if self.attn_post_ln is not None and self.ffn_post_ln is not None:
            if self.attn_inner_post_ln is not None:
                attended = self.attn_inner_post_ln(attended, x)
            x = self.attn_post_ln(attended, x)
            summed: Tensor = self.ffn_post_ln(ffn(x), x)
            return summed
        branch, scale = attended, self.scale
        if self.cross is not None:
            x, read = add_and_norm(self.cross_norm, x, branch, scale)
            branch, scale = self.cross(read, step, logits_rows=logits_rows), 1.0
        x, read = add_and_norm(self.ffn_norm, x, branch, scale)
        return add_scaled(x, self.ffn_output_norm(ffn(read)), self.scale)

    def _with_normed_residual(
        self, x: Tensor, factors: NormedResidual, step: StepContext, *, last_layer: bool
    ) -> Tensor:
        assert self.attn is not None
        assert self.ffn is not None
        normed = self.attn_norm(x)
        attended = self.attn(normed, step, last_layer=last_layer)
        if last_layer and step.last_token_only and step.logits_indices is not None:
            normed = take_rows(normed, step.logits_indices)
        normed = self.ffn_norm(add_scaled(scaled(normed, factors.attn_residual), attended, factors.attn_branch))
        return add_scaled(scaled(normed, factors.ffn_residual), self.ffn(normed), factors.ffn_branch)

    def _with_streams(self, x: Tensor, streams: LayerStreams, step: StepContext, *, last_layer: bool) -> Tensor:
        """(tokens, count * hidden) to the same, of a layer whose tokens have several hidden states; see `Streams`."""
        assert self.attn is not None
        assert self.ffn is not None
        assert self.side is not None
        predicted = streams.predict(x)
        normed = self.attn_norm(streams.active(predicted))
        attended = self.attn_output_norm(self.attn(normed, step, last_layer=last_layer))
        if last_layer and step.last_token_only and step.logits_indices is not None:
            predicted, normed = streams.rows(predicted, step.logits_indices), take_rows(normed, step.logits_indices)
        branches = add_scaled(add_scaled(streams.active(predicted), attended), self.side(normed))
        h = scaled(branches, 2**-0.5)
        h = add_scaled(h, self.ffn_output_norm(self.ffn(self.ffn_norm(h))))
        corrected = streams.correct(predicted, h)
        if self.layer_input is not None:
            added = self.layer_input(streams.scaled_active(corrected), step, last_layer=last_layer)
            add_to_streams(corrected, added)
        return corrected.flatten(1)

    def _one_branch(self, x: Tensor, step: StepContext, *, last_layer: bool) -> Tensor:
        """The result of a layer that has attention alone, or a feed-forward alone."""
        if self.attn is not None:
            branch = self.attn_output_norm(self.attn(self.attn_norm(x), step, last_layer=last_layer))
        if last_layer and step.last_token_only and step.logits_indices is not None:
            set_row_kind(RowKind.LOGITS)  # of all later calls of the step
            x = take_rows(x, step.logits_indices)
        if self.ffn is not None:
            branch = self.ffn_output_norm(self.ffn(self.ffn_norm(x)))
        return add_scaled(x, branch, self.scale)


def _give_six_bits(layer: TransformerLayer, hidden: int) -> None:
    """Choose what gets 6 bits instead of 4 with int4: the smaller a model is, the less it forgives.

    Errors of values cost most for their size: a third of what 4 bits cost Gemma 3 270M comes from 3 % of its weights.
    Next are the projections at the end of feed-forwards.
    """
    for module in layer.modules():
        if isinstance(module, Linear) and hidden < _SMALL:
            module.six_bit_rows = sum(module.parts)
        elif isinstance(module, GroupedAttentionLayer):
            module.qkv.six_bit_rows = module.qkv.parts[-1]
        elif isinstance(module, GatedMLPLayer | PlainMLPLayer) and hidden < _LARGE:
            module.down.six_bit_rows = hidden


class LayerStack(nn.Module):
    """The layers of a `StackSpec`."""

    def __init__(self, spec: StackSpec, source: int = 0, group: RankGroup | None = None) -> None:
        """`source` and `group`: see `TransformerLayer`."""
        super().__init__()
        memory = ExpertMemory(spec.hidden)
        layers = (
            ConformerBlock(index, layer, spec)
            if isinstance(layer, ConformerLayer)
            else TransformerLayer(index, layer, spec, source, group, memory)
            for index, layer in enumerate(spec.layers)
        )
        self.layers = nn.ModuleList(layers)
        share_blocks(layer.attn for layer in self.layers if isinstance(layer, TransformerLayer))
        self._order = tuple(range(len(self.layers))) if spec.order is None else spec.order
        self.norm = make_norm(spec.hidden, spec.norm) if spec.final_norm else nn.Identity()
        self.stream_ends: StreamEnds | None = None
        self._first_reader = _first_reader(spec)

    def run_layers(self, x: Tensor, step: StepContext, *, normed: bool = True, more_layers: bool = False) -> Tensor:
        """(tokens, hidden) to the hidden states after the norm.

        Args:
            x: input of the first layer.
            step: values for all layers.
            normed: False: without the norm.
            more_layers: another rank has layers after these.
        """
        reads_only = self._first_reader < len(self.layers) and not more_layers  # which get all rows
        rows_attention = step.attend.of_logits_rows() if reads_only else None
        for level, index in enumerate(self._order):
            layer = self.layers[index]
            is_last = layer is self.layers[-1] and not more_layers
            reads_rows = rows_attention is not None and index >= self._first_reader
            x = layer(x, step, last_layer=is_last or reads_rows)
            if reads_rows and step.last_token_only and step.logits_indices is not None:
                assert rows_attention is not None
                step = step.of_logits_rows(rows_attention)
            if step.items is not None:
                x = step.items.add_level(level, x)
        if self.stream_ends is not None and not more_layers:
            x = self.stream_ends.merged(x)
        hidden: Tensor = self.norm(x) if normed else x
        return hidden


def _first_reader(spec: StackSpec) -> int:
    """Index of the first of the layers at the end that store nothing: of other rows than those that logits are computed
    for, nobody reads what they compute. The number of layers if the last one stores something."""
    first = len(spec.layers)
    while first and isinstance(spec.layers[first - 1].attn, SharedKeysAttention):
        first -= 1
    return first


class SideBySideLayer(nn.Module):
    """Attention and a recurrence whose results are added; see `SideBySide`."""

    def __init__(self, index: int, spec: SideBySide, model: StackSpec, group: RankGroup | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.attention = _attention(index, spec.attention, model, group)
        self.recurrence = _attention(index, spec.recurrence, model, group)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec = self.spec
        remembered = scaled(self.recurrence(x, step, last_layer=last_layer), spec.recurrence_scale)
        set_row_kind(RowKind.TOKENS)  # attention reads all of them again
        attended = self.attention(scaled(x, spec.input_scale), step, last_layer=last_layer)
        return add_scaled(remembered, attended, spec.scale)


# By kind of attention: the class of its layers. Those of packages outside of the tree name theirs in `Attention.layer`.
_ATTENTION_LAYERS: dict[type[Attention], Callable[[int, Any, StackSpec, RankGroup | None], nn.Module]] = {
    GroupedQueryAttention: GroupedAttentionLayer,
    LatentAttention: LatentAttentionLayer,
    DisentangledAttention: DisentangledAttentionLayer,
    GatedDeltaNet: DeltaNetLayer,
    ShortConvolution: ShortConvLayer,
    ChannelStateSpace: ChannelStateSpaceLayer,
    HeadStateSpace: HeadStateSpaceLayer,
    SharedKeysAttention: SharedKeysLayer,
    SideBySide: SideBySideLayer,
    GatedLinearRecurrence: LinearRecurrenceLayer,
    DecayingAttention: DecayingAttentionLayer,
    BlockBeforeRecurrence: lambda index, spec, model, group: BlockBeforeRecurrenceLayer(
        index, spec, model, group, _attention
    ),
}


def _attention(index: int, spec: Attention, model: StackSpec, group: RankGroup | None) -> nn.Module:
    make = pkgutil.resolve_name(spec.layer) if spec.layer else _ATTENTION_LAYERS[type(spec)]
    layer: nn.Module = make(index, spec, model, group)
    return layer


def _feed_forward(
    spec: FeedForward, model: StackSpec, group: RankGroup | None, memory: ExpertMemory | None
) -> nn.Module:
    if isinstance(spec, GatedMLP):
        return GatedMLPLayer(
            model.hidden,
            spec.size,
            spec.act,
            bias=spec.bias,
            down_bias=spec.down_bias,
            gate_scale=spec.gate_scale,
            out_scale=spec.out_scale,
            sparsity=spec.sparsity,
            group=group,
        )
    if isinstance(spec, LearnedMLP):
        return LearnedMLPLayer(model.hidden, spec.size, group=group)
    if isinstance(spec, PlainMLP):
        return PlainMLPLayer(model.hidden, spec.size, spec.act, bias=spec.bias, group=group)
    return MoELayer(model.hidden, spec, group, model.norm, memory)

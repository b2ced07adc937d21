"""Embeddings, layers and final norm of a `TransformerSpec`; decoders and encoders add what they have of their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from quire.engine.models.inputs import Attend, ModelInputs
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.disentangled import DisentangledAttentionLayer, RelativePositions
from quire.engine.models.layers.embedding import Embedding, EmbeddingSum
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.layers.latent import LatentAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.layers.moe import MoELayer
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.layers.relative_bias import RelativeBiasTable
from quire.engine.models.layers.rope import RopeTables, rope_switch
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import (
    Attention,
    DisentangledAttention,
    FeedForward,
    GatedMLP,
    GroupedAttention,
    Layer,
    Parallel,
    PlainMLP,
    TransformerSpec,
)
from quire.kernels.add_scaled import add_scaled
from quire.kernels.take_rows import take_rows


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each in a residual branch."""

    def __init__(self, index: int, spec: Layer, model: TransformerSpec) -> None:
        super().__init__()
        self.scale = spec.residual_scale
        self.parallel = spec.parallel
        self.attn = _attention(index, spec.attn, model)
        self.ffn = _feed_forward(spec.ffn, model)

        def norm(exists: bool) -> nn.Module:
            return make_norm(model.hidden, model.norm) if exists else nn.Identity()

        self.attn_norm = norm(spec.pre_norm and spec.pre_attn_norm)
        self.ffn_norm = norm(spec.pre_norm and spec.parallel is not Parallel.ONE_NORM)
        self.attn_post_norm, self.ffn_post_norm = norm(spec.post_norm), norm(spec.post_norm)
        self.attn_inner_norm = make_norm(model.hidden, model.norm) if spec.inner_sum_norm else None
        self.attn_sum_norm = make_norm(model.hidden, model.norm) if spec.sum_norm else None
        self.ffn_sum_norm = make_norm(model.hidden, model.norm) if spec.sum_norm else None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `Attend`."""
        normed = self.attn_norm(x)
        attended = self.attn_post_norm(self.attn(normed, step, last_layer=last_layer))
        if last_layer and step.last_token_only and step.logits_indices is not None:
            x, normed = take_rows(x, step.logits_indices), take_rows(normed, step.logits_indices)
        if self.parallel is not None:
            read = normed if self.parallel is Parallel.ONE_NORM else self.ffn_norm(x)
            return add_scaled(x, add_scaled(attended, self.ffn(read)))
        if self.attn_sum_norm is not None and self.ffn_sum_norm is not None:
            if self.attn_inner_norm is not None:
                attended = self.attn_inner_norm(attended, x)
            x = self.attn_sum_norm(attended, x)
            summed: Tensor = self.ffn_sum_norm(self.ffn(x), x)
            return summed
        x = add_scaled(x, attended, self.scale)
        return add_scaled(x, self.ffn_post_norm(self.ffn(self.ffn_norm(x))), self.scale)


class Transformer(nn.Module):
    """Runs a `TransformerSpec`. Call `set_context` before the first `run`."""

    def __init__(self, spec: TransformerSpec, tied: Linear | None = None) -> None:
        """`tied`: the output projection that shares the embedding's weight."""
        super().__init__()
        size = spec.embeddings.size or spec.hidden
        self.embed = Embedding(spec.vocab, size, tied)
        self.embed_sum = EmbeddingSum(spec)
        self.layers = nn.ModuleList(TransformerLayer(i, layer, spec) for i, layer in enumerate(spec.layers))
        self.norm = make_norm(spec.hidden, spec.norm) if spec.final_norm else nn.Identity()
        biases = [a.relative_bias for a in _grouped(spec) if a.relative_bias is not None]
        self.relative_bias = RelativeBiasTable(biases[0], _grouped(spec)[0].heads) if biases else None
        tables = [layer.attn for layer in spec.layers if isinstance(layer.attn, DisentangledAttention)]
        self.relative_positions = RelativePositions(tables[0], spec) if tables else None
        self.heads: PoolerHeads | None = None
        self.spec = spec

    def run(
        self,
        inputs: ModelInputs,
        attend: Attend,
        *,
        last_token_only: bool = False,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """See `LanguageModel`. `between_layers` is called after each layer but the last."""
        x = self.embed_sum(self.embed(inputs.token_ids), inputs)
        step = StepContext(
            self._ropes.at(inputs.positions),
            attend,
            inputs.logits_indices,
            last_token_only,
            inputs.cu_seqlens,
            None if self.relative_bias is None else self.relative_bias(),
            None if self.relative_positions is None else self.relative_positions(),
        )
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            x = layer(x, step, last_layer=is_last)
            if between_layers is not None and not is_last:
                between_layers()
        hidden: Tensor = self.norm(x)
        return hidden

    @property
    def pooler_heads(self) -> PoolerHeads:
        """The heads of a model that pools."""
        assert self.heads is not None
        return self.heads

    def set_context(self, context_len: int) -> None:
        """See `LanguageModel`."""
        ropes = {layer.attn.rope for layer in self.spec.layers if layer.attn.rope is not None}
        self.context_len = context_len
        self.rope_switch = rope_switch(ropes, context_len)
        self._ropes = RopeTables(ropes, context_len, self.rope_switch, next(self.parameters()).device)


def _grouped(spec: TransformerSpec) -> list[GroupedAttention]:
    return [layer.attn for layer in spec.layers if isinstance(layer.attn, GroupedAttention)]


def _attention(index: int, spec: Attention, model: TransformerSpec) -> nn.Module:
    if isinstance(spec, GroupedAttention):
        return GroupedAttentionLayer(index, spec, model)
    if isinstance(spec, DisentangledAttention):
        return DisentangledAttentionLayer(spec, model)
    return LatentAttentionLayer(index, spec, model)


def _feed_forward(spec: FeedForward, model: TransformerSpec) -> nn.Module:
    if isinstance(spec, GatedMLP):
        return GatedMLPLayer(model.hidden, spec.size, spec.act, bias=spec.bias, down_bias=spec.down_bias)
    if isinstance(spec, PlainMLP):
        return PlainMLPLayer(model.hidden, spec.size, spec.act, bias=spec.bias)
    return MoELayer(model.hidden, spec)

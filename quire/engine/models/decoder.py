"""The decoder that runs every `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.engine.models.inputs import Attend, ModelInputs
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.latent import LatentAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.layers.moe import MoELayer
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.rope import RopeTables, rope_switch
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import DecoderSpec, GatedMLP, GroupedAttention, LatentAttention, Layer
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.softcap import softcap
from quire.kernels.take_rows import take_rows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer caches of a token: key_dim elements per head, and value_dim more unless values lie in the keys.

    Each key and each value takes a multiple of `alignment` elements in the pages; those past its own are zero.
    """

    heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    alignment: int = 1

    @property
    def key_elements(self) -> int:
        """Elements of a key in the pages."""
        return -(-self.key_dim // self.alignment) * self.alignment

    @property
    def value_elements(self) -> int:
        """Elements of a value in the pages."""
        return -(-self.value_dim // self.alignment) * self.alignment

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.heads * (self.key_elements + (0 if self.values_in_keys else self.value_elements))

    @property
    def rows(self) -> int:
        """Rows of elements per token, one for each head's key and value."""
        return self.heads * (1 if self.values_in_keys else 2)


class LanguageModel(Protocol):
    """What the model runner needs of a model."""

    @property
    def caches(self) -> Sequence[CacheShape]:
        """What each layer's KV cache holds of a token."""

    @property
    def rope_switch(self) -> int | None:
        """Length of the longest sequence before a long rope takes other frequencies, for all of its tokens.

        None if the context is not longer, or the model has no such rope.
        """

    @property
    def lm_head(self) -> LogitsHead:
        """The head that gives logits."""

    def run(self, inputs: ModelInputs, attend: Attend, *, last_token_only: bool = False) -> Tensor:
        """Hidden states after the final norm.

        Args:
            inputs: the tokens of a step.
            attend: the step's attention.
            last_token_only: compute only the rows `inputs.logits_indices`, where it is not None.

        Returns:
            (tokens, hidden), or (len(logits_indices), hidden).
        """

    def set_context(self, context_len: int) -> None:
        """Set the length of the longest sequence."""


class LogitsHead(Protocol):
    """Logits of hidden states: a projection, then scale and softcap."""

    vocab_size: int

    def project(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """The output projection.

        Args:
            hidden: the result of the model's last run, (tokens, hidden).
            rows: rows of `hidden` to project; None for all.
            out: memory for the result.

        Returns:
            (rows, vocab) float32.
        """

    def adjust(self, projected: Tensor) -> Tensor:
        """Logits from the projection; may return its argument."""


def compute_logits(head: LogitsHead, hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
    """Logits (rows, vocab) float32; see `LogitsHead.project`."""
    return head.adjust(head.project(hidden, rows=rows))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each in a residual branch."""

    def __init__(self, index: int, spec: Layer, decoder: DecoderSpec) -> None:
        super().__init__()
        self.scale = spec.residual_scale
        self.attn = (
            GroupedAttentionLayer(index, spec.attn, decoder)
            if isinstance(spec.attn, GroupedAttention)
            else LatentAttentionLayer(index, spec.attn, decoder)
        )
        self.ffn = (
            GatedMLPLayer(decoder.hidden, spec.ffn.size, spec.ffn.act, bias=spec.ffn.bias)
            if isinstance(spec.ffn, GatedMLP)
            else MoELayer(decoder.hidden, spec.ffn)
        )

        def norm(exists: bool) -> nn.Module:
            return RMSNorm(decoder.hidden, decoder.eps, decoder.norm_offset) if exists else nn.Identity()

        self.attn_norm, self.ffn_norm = norm(spec.pre_norm), norm(spec.pre_norm)
        self.attn_post_norm, self.ffn_post_norm = norm(spec.post_norm), norm(spec.post_norm)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `Attend`."""
        attended = self.attn_post_norm(self.attn(self.attn_norm(x), step, last_layer=last_layer))
        if last_layer and step.last_token_only and step.logits_indices is not None:
            x = take_rows(x, step.logits_indices)
        x = add_scaled(x, attended, self.scale)
        return add_scaled(x, self.ffn_post_norm(self.ffn(self.ffn_norm(x))), self.scale)


class LMHead(nn.Module):
    """The output projection of a decoder; see `LogitsHead`."""

    def __init__(self, spec: DecoderSpec, linear: Linear) -> None:
        super().__init__()
        self.vocab_size = spec.vocab
        self._scale, self._softcap = spec.logit_scale, spec.logit_softcap
        self._linear = (linear,)  # in a tuple: it is registered with the decoder, under the checkpoint's name

    def project(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """See `LogitsHead`."""
        hidden = hidden if rows is None else hidden[rows]
        projected: Tensor = self._linear[0](hidden, out_dtype=torch.float32, out=out)
        return projected

    def adjust(self, projected: Tensor) -> Tensor:
        """See `LogitsHead`."""
        logits = projected if self._scale == 1.0 else projected * self._scale
        return logits if self._softcap is None else softcap(logits, self._softcap)


class Decoder(nn.Module):
    """Embedding, layers, final norm and head of a `DecoderSpec`. Call `set_context` before the first `run`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        head = Linear(spec.hidden, spec.vocab)
        self.embed = Embedding(spec.vocab, spec.hidden, head if spec.tied else None)
        self.layers = nn.ModuleList(DecoderLayer(i, layer, spec) for i, layer in enumerate(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.eps, spec.norm_offset)
        self.head = head
        self.lm_head = LMHead(spec, head)
        self.caches: Sequence[CacheShape] = [_cache_shape(layer.attn) for layer in spec.layers]

    def run(self, inputs: ModelInputs, attend: Attend, *, last_token_only: bool = False) -> Tensor:
        """See `LanguageModel`."""
        x = scaled(self.embed(inputs.token_ids), self.spec.embed_scale)
        step = StepContext(self._ropes.at(inputs.positions), attend, inputs.logits_indices, last_token_only)
        for layer in self.layers:
            x = layer(x, step, last_layer=layer is self.layers[-1])
        hidden: Tensor = self.norm(x)
        return hidden

    def set_context(self, context_len: int) -> None:
        """See `LanguageModel`."""
        ropes = {layer.attn.rope for layer in self.spec.layers if layer.attn.rope is not None}
        self.context_len = context_len
        self.rope_switch = rope_switch(ropes, context_len)
        self._ropes = RopeTables(ropes, context_len, self.rope_switch, self.norm.weight.device)


def _cache_shape(spec: GroupedAttention | LatentAttention) -> CacheShape:
    if isinstance(spec, GroupedAttention):
        return CacheShape(spec.kv_heads, spec.head_dim, spec.head_dim)
    return CacheShape(1, spec.kv_rank + spec.rope.dim, spec.kv_rank, values_in_keys=True)

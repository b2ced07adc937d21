"""One decoder for every architecture that a DecoderSpec can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.latent import LatentAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.layers.moe import MoELayer
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.replays import Replays
from quire.engine.models.layers.rope import RopeTables
from quire.engine.models.layers.step import Attend, StepContext
from quire.engine.models.spec import DecoderSpec, GatedMLP, GroupedAttention, LatentAttention, Layer
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.softcap import softcap
from quire.kernels.take_rows import take_rows

_MOST_ENDS = 128  # sequences whose logits have a fixed place


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer keeps of a token: key_dim numbers for each head, and value_dim more unless values lie in keys."""

    heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))

    @property
    def rows(self) -> int:
        """Rows of numbers per token."""
        return self.heads * (1 if self.values_in_keys else 2)


class CausalLM(Protocol):
    """What the model runner needs of a model."""

    caches: Sequence[CacheShape]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Run all tokens at their positions, both (tokens,), and give what `logits` takes for some rows of them."""

    def logits(self, features: Tensor) -> Tensor:
        """(rows, vocab) float32."""

    def decode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits (ends, vocab) float32 of the ends of a step whose attention `stays`, valid until the next call."""

    def set_context(self, context_len: int) -> None:
        """No sequence will be longer; a long rope chooses its frequencies by this."""


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

    def forward(self, x: Tensor, step: StepContext, *, last: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden); if the step's last layer is cut, to (ends, hidden) there."""
        attended = self.attn_post_norm(self.attn(self.attn_norm(x), step, last=last))
        ends = step.attend.ends if last and step.cut else None
        x = add_scaled(x if ends is None else take_rows(x, ends), attended, self.scale)
        return add_scaled(x, self.ffn_post_norm(self.ffn(self.ffn_norm(x))), self.scale)


class Decoder(nn.Module):
    """Embedding, layers, norm and head, as the spec says. It wants `set_context` before it runs."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        head = Linear(spec.hidden, spec.vocab)
        self.embed = Embedding(spec.vocab, spec.hidden, head if spec.tied else None)
        self.layers = nn.ModuleList(DecoderLayer(i, layer, spec) for i, layer in enumerate(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.eps, spec.norm_offset)
        self.head = head
        self.caches: Sequence[CacheShape] = [_cache_shape(layer.attn) for layer in spec.layers]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Last hidden states (rows, hidden) of some rows of the tokens at positions, both (tokens,)."""
        cut = attend.ends is not None and torch.equal(attend.ends, rows)
        last = self._run_layers(tokens, positions, attend, cut=cut)
        out: Tensor = self.norm(last if cut else last[rows])
        return out

    def decode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalLM`."""
        cut = attend.ends is not None
        ends = len(tokens) if attend.ends is None else len(attend.ends)
        room = self._room[:ends] if ends <= len(self._room) else None

        def step() -> Tensor:
            features = self.norm(self._run_layers(tokens, positions, attend, cut=cut))
            out: Tensor = self.head(features, wide=True, out=room)
            return out

        if room is None:
            return self._adjusted(step())
        self._replays.run(step, len(tokens), ends)
        return self._adjusted(room)

    def set_context(self, context_len: int) -> None:
        """See `CausalLM`."""
        ropes = {layer.attn.rope for layer in self.spec.layers if layer.attn.rope is not None}
        self.context_len = context_len
        self._ropes = RopeTables(ropes, context_len)
        self._replays = Replays()

    def logits(self, features: Tensor) -> Tensor:
        """(rows, vocab) float32 of hidden states (rows, hidden)."""
        return self._adjusted(self.head(features, wide=True))

    def _run_layers(self, tokens: Tensor, positions: Tensor, attend: Attend, *, cut: bool = False) -> Tensor:
        x = scaled(self.embed(tokens), self.spec.embed_scale)
        step = StepContext(self._ropes.at(positions), attend, cut)
        for layer in self.layers:
            x = layer(x, step, last=layer is self.layers[-1])
        return x

    def _adjusted(self, logits: Tensor) -> Tensor:
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap)

    @cached_property
    def _room(self) -> Tensor:
        """Where steps write their logits."""
        return torch.empty(_MOST_ENDS, self.spec.vocab)


def _cache_shape(spec: GroupedAttention | LatentAttention) -> CacheShape:
    if isinstance(spec, GroupedAttention):
        return CacheShape(spec.kv_heads, spec.head_dim, spec.head_dim)
    return CacheShape(1, spec.kv_rank + spec.rope.dim, spec.kv_rank, values_in_keys=True)

"""Layers of conformers (Gulati et al. 2020)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import PlainMLPLayer
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.layers.stem import ConvWeights
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import ConformerLayer, RelativeAttention, StackSpec
from quire.kernels.activation import activation
from quire.kernels.add_scaled import add_scaled

_BASE = 10_000.0  # of sinusoids
_EPS = 1e-5  # of batch norms


class ConformerBlock(nn.Module):
    """The modules of a `ConformerLayer`."""

    def __init__(self, spec: ConformerLayer, model: StackSpec) -> None:
        super().__init__()
        hidden = model.hidden
        self.ffn1, self.ffn2 = (PlainMLPLayer(hidden, spec.ffn.size, spec.ffn.act, bias=spec.ffn.bias) for _ in "12")
        self.attn = RelativeAttentionLayer(spec.attn, hidden)
        self.conv = ConformerConv(spec, hidden)
        norms = (make_norm(hidden, model.norm) for _ in range(5))
        self.ffn1_norm, self.attn_norm, self.conv_norm, self.ffn2_norm, self.out_norm = norms

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        x = add_scaled(x, self.ffn1(self.ffn1_norm(x)), 0.5)
        x = add_scaled(x, self.attn(self.attn_norm(x), step))
        x = add_scaled(x, self.conv(self.conv_norm(x), step))
        x = add_scaled(x, self.ffn2(self.ffn2_norm(x)), 0.5)
        normed: Tensor = self.out_norm(x)
        return normed


class ConformerConv(nn.Module):
    """A gated projection, a convolution of each channel over time, a norm by known statistics, a projection."""

    def __init__(self, spec: ConformerLayer, hidden: int) -> None:
        super().__init__()
        self.act = spec.conv_act
        self.up = Linear(hidden, 2 * hidden, bias=spec.conv_bias)
        self.over_time = ConvWeights(hidden, 1, spec.kernel, bias=spec.conv_bias)
        self.norm = BatchNorm(hidden)
        self.down = Linear(hidden, hidden, bias=spec.conv_bias)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        assert step.cu_seqlens is not None
        gated = F.glu(self.up(x), -1)
        half = self.over_time.weight.shape[2] // 2
        convolved = torch.empty_like(gated)
        for begin, end in itertools.pairwise(step.cu_seqlens.tolist()):
            channels = gated[begin:end].T[None]
            out = F.conv1d(channels, self.over_time.weight, self.over_time.bias, padding=half, groups=channels.shape[1])
            convolved[begin:end] = out[0].T
        down: Tensor = self.down(activation(self.norm(convolved), self.act, in_place=True))
        return down


class BatchNorm(nn.Module):
    """A batch norm with the statistics of its training."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.mean = nn.Parameter(torch.empty(size), requires_grad=False)
        self.variance = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, size)."""
        weight, bias, mean, variance = (p.float() for p in (self.weight, self.bias, self.mean, self.variance))
        factor = weight * torch.rsqrt(variance + _EPS)
        return (x.float() * factor + (bias - mean * factor)).to(x.dtype)


class RelativeAttentionLayer(nn.Module):
    """The projections and attention of a `RelativeAttention`."""

    def __init__(self, spec: RelativeAttention, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        size = spec.heads * spec.head_dim
        self.qkv = Linear(hidden, size, size, size, bias=spec.bias)
        self.out = Linear(size, hidden, bias=spec.bias)
        self.distances = Linear(hidden, size)
        self.content_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim), requires_grad=False)
        self.distance_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim), requires_grad=False)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        assert step.cu_seqlens is not None
        assert step.relative_positions is not None
        heads = self.spec.heads
        keys = self.distances(step.relative_positions).unflatten(1, (heads, -1)).transpose(0, 1)
        q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, 1))
        bounds = step.cu_seqlens.tolist()
        attended = [self._attend(q[:, a:b], k[:, a:b], v[:, a:b], keys) for a, b in itertools.pairwise(bounds)]
        out: Tensor = self.out(torch.cat(attended, 1).transpose(0, 1).flatten(1))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        """Attention of one item. keys: (heads, 2 * longest - 1, head_dim), see `sinusoids`."""
        length, longest = q.shape[1], keys.shape[1] // 2 + 1
        keys = keys[:, longest - length : longest + length - 1]
        scores = torch.matmul(q + self.distance_bias[:, None], keys.transpose(1, 2))
        # The row of a query at i begins with the distance length - 1; that of the key at 0 is i.
        rows = scores.new_empty(scores.shape[0], length, 2 * length)
        rows[:, :, 0], rows[:, :, 1:] = 0, scores
        shifted = rows.flatten(1)[:, length:].unflatten(1, (length, -1))
        bias = shifted[:, :, :length] * self.spec.scale
        query = (q + self.content_bias[:, None])[None]
        return F.scaled_dot_product_attention(query, k[None], v[None], attn_mask=bias[None], scale=self.spec.scale)[0]


def sinusoids(longest: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(2 * longest - 1, hidden): vectors of the distances longest - 1 to 1 - longest, query minus key."""
    powers = torch.arange(0, hidden, 2, dtype=torch.float32, device=device) / hidden
    distances = torch.arange(longest - 1, -longest, -1, dtype=torch.float32, device=device)
    phase = distances[:, None] * (1.0 / _BASE**powers)
    return torch.stack((phase.sin(), phase.cos()), -1).flatten(1)[:, :hidden].to(dtype)

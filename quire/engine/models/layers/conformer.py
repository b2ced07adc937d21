"""Layers of conformers (Gulati et al. 2020)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.layers.norm import LayerNorm, make_norm
from quire.engine.models.layers.stem import ConvWeights
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.audio import BlockAttention, ChunkedAttention, RelativeAttention, TimeConv
from quire.engine.models.specs.decoder import ConformerLayer, PlainMLP, StackSpec
from quire.kernels.activation import act_and_mul, activation
from quire.kernels.add_scaled import add_scaled

_BASE = 10_000.0  # of sinusoids
_EPS = 1e-5  # of batch norms


class ConformerBlock(nn.Module):
    """The modules of a `ConformerLayer`."""

    def __init__(self, index: int, spec: ConformerLayer, model: StackSpec) -> None:
        super().__init__()
        hidden = model.hidden
        self.ffn1, self.ffn2 = (_feed_forward(spec, hidden) for _ in "12")
        self.attn = _attention(index, spec, model)
        self.conv = ConformerConv(2 * index + 1, spec.conv, hidden)
        norms = (make_norm(hidden, model.norm) for _ in range(5))
        self.ffn1_norm, self.attn_norm, self.conv_norm, self.ffn2_norm, self.out_norm = norms
        self.feedback = Feedback(hidden, spec.feedback) if spec.feedback else None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        x = add_scaled(x, self.ffn1(self.ffn1_norm(x)), 0.5)
        x = add_scaled(x, self.attn(self.attn_norm(x), step))
        x = add_scaled(x, self.conv(self.conv_norm(x), step))
        x = add_scaled(x, self.ffn2(self.ffn2_norm(x)), 0.5)
        normed: Tensor = self.out_norm(x)
        return normed if self.feedback is None else self.feedback(normed)


def _feed_forward(spec: ConformerLayer, hidden: int) -> nn.Module:
    made = PlainMLPLayer if isinstance(spec.ffn, PlainMLP) else GatedMLPLayer
    return made(hidden, spec.ffn.size, spec.ffn.act, bias=spec.ffn.bias)


def _attention(index: int, spec: ConformerLayer, model: StackSpec) -> nn.Module:
    match spec.attn:
        case RelativeAttention():
            return RelativeAttentionLayer(spec.attn, model.hidden)
        case ChunkedAttention():
            return ChunkedAttentionLayer(2 * index, spec.attn, model.hidden)
        case BlockAttention():
            return BlockAttentionLayer(spec.attn, model.hidden)
        case _:
            return GroupedAttentionLayer(index, spec.attn, model)


class Feedback(nn.Module):
    """Add the projected probabilities of classes; see `ConformerLayer.feedback`."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.classes = Linear(hidden, classes, bias=True)
        self.back = Linear(classes, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        probabilities = self.classes(x).softmax(-1)
        return add_scaled(x, self.back(probabilities))


class ConformerConv(nn.Module):
    """The layers of a `TimeConv`."""

    def __init__(self, state: int, spec: TimeConv, hidden: int) -> None:
        """`state`: index of its state; see `TransducerSpec.states`."""
        super().__init__()
        self.state = state
        self.spec = spec
        self.up = Linear(hidden, 2 * spec.size, bias=spec.bias)
        self.over_time = ConvWeights(spec.size, 1, spec.kernel, bias=spec.kernel_bias)
        batch_norm = None if spec.mixes else BatchNorm(spec.size)
        self.norm = batch_norm if spec.norm is None else LayerNorm(spec.size, spec.norm)
        self.mix = Linear(spec.size, spec.size, bias=spec.bias) if spec.mixes else None
        self.down = Linear(spec.size, hidden, bias=spec.bias)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(positions, hidden) to (positions, hidden).

        The outputs of `up` are values and then gates if these have a sigmoid, else gates and then values.
        """
        assert step.cu_seqlens is not None
        spec = self.spec
        up = self.up(x)
        gated = F.glu(up, -1) if spec.gate == "sigmoid" else act_and_mul(up, spec.gate)
        bounds = list(itertools.pairwise(step.cu_seqlens.tolist()))
        convolved = torch.empty_like(gated)
        for (begin, end), columns in zip(bounds, self._inputs(gated, bounds, step), strict=True):
            out = F.conv1d(columns.T[None], self.over_time.weight, self.over_time.bias, groups=spec.size)
            convolved[begin:end] = out[0].T
        mixed = convolved if self.mix is None else self.mix(convolved)
        normed = mixed if self.norm is None else self.norm(mixed)
        down: Tensor = self.down(activation(normed, spec.act, in_place=True))
        return down

    def _inputs(self, gated: Tensor, bounds: Sequence[tuple[int, int]], step: StepContext) -> list[Tensor]:
        """The columns that the convolution reads for each item: its own and those around them."""
        spec, states = self.spec, step.states
        parts = [gated[begin:end] for begin, end in bounds]
        if states is None:
            around = (spec.kernel - 1, 0) if spec.causal else (spec.kernel // 2, (spec.kernel - 1) // 2)
            return [F.pad(part, (0, 0, *around)) for part in parts]
        (before,) = states.read(self.state)
        joined = [torch.cat(pair) for pair in zip(before, parts, strict=True)]
        states.write(self.state, [torch.stack([columns[len(columns) - spec.kernel + 1 :] for columns in joined])])
        return joined


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


class _RelativeProjections(nn.Module):
    """The parameters of attention that depends on distances."""

    def __init__(self, spec: RelativeAttention | ChunkedAttention, hidden: int) -> None:
        super().__init__()
        size = spec.heads * spec.head_dim
        self.qkv = Linear(hidden, size, size, size, bias=spec.bias)
        self.out = Linear(size, hidden, bias=spec.bias)
        self.distances = Linear(hidden, size)
        self.content_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim), requires_grad=False)
        self.distance_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim), requires_grad=False)


class RelativeAttentionLayer(_RelativeProjections):
    """The projections and attention of a `RelativeAttention`."""

    def __init__(self, spec: RelativeAttention, hidden: int) -> None:
        super().__init__(spec, hidden)
        self.spec = spec

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
        bias = _by_distance(scores) * self.spec.scale
        query = (q + self.content_bias[:, None])[None]
        return F.scaled_dot_product_attention(query, k[None], v[None], attn_mask=bias[None], scale=self.spec.scale)[0]


class ChunkedAttentionLayer(_RelativeProjections):
    """The projections and attention of a `ChunkedAttention`. All chunks of a step are computed together."""

    derived_from_weights = ("_distance_keys",)  # made when first needed

    def __init__(self, state: int, spec: ChunkedAttention, hidden: int) -> None:
        """`state`: index of its state; see `TransducerSpec.states`."""
        super().__init__(spec, hidden)
        self.state = state
        self.spec = spec
        self.hidden = hidden
        self._distance_keys: Tensor | None = None

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(positions, hidden) to (positions, hidden): of each sequence whole chunks."""
        assert step.cu_seqlens is not None
        assert step.states is not None
        assert step.chunk_mask is not None
        q, k, v = (part.unflatten(1, (self.spec.heads, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, 1))
        lengths = step.cu_seqlens.diff().tolist()
        windows, after = [], []
        for before, new in zip(step.states.read(self.state), (k, v), strict=True):
            joined = [torch.cat(pair, 1) for pair in zip(before, new.split(lengths, 1), strict=True)]
            windows.append(torch.cat([self._windows(positions) for positions in joined]))
            last = [positions[:, length:] for positions, length in zip(joined, lengths, strict=True)]
            after.append(torch.stack(last))
        step.states.write(self.state, after)
        queries = q.unflatten(1, (-1, self.spec.chunk)).transpose(0, 1)
        keys, values = windows
        attended = self._attend(queries, keys, values, step.chunk_mask)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(len(x), -1))
        return out

    def _windows(self, x: Tensor) -> Tensor:
        """(heads, past + positions, head_dim) to (chunks, heads, past + chunk, head_dim)."""
        return x.unfold(1, self.spec.past + self.spec.chunk, self.spec.chunk).permute(1, 0, 3, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Attention of chunks (chunks, heads, chunk, head_dim) to their windows (chunks, heads, window, head_dim)."""
        if self._distance_keys is None:  # these are the same for every chunk
            window = self.spec.past + self.spec.chunk
            table = sinusoids(range(window - 1, -self.spec.chunk, -1), self.hidden, q.dtype, q.device)
            self._distance_keys = self.distances(table).unflatten(1, (self.spec.heads, -1)).permute(1, 2, 0)
        scores = torch.matmul(q + self.distance_bias[:, None], self._distance_keys).contiguous()
        # Row i has the scores of the distances window - 1 to 1 - chunk; that of the key at j is past + i - j.
        columns = scores.shape[-1]
        strides = (*scores.stride()[:2], columns - 1, 1)
        bias = scores.as_strided((*q.shape[:3], k.shape[2]), strides, self.spec.chunk - 1) * self.spec.scale
        bias = bias.masked_fill(~valid[:, None, None], -torch.inf)
        query = q + self.content_bias[:, None]
        return F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=self.spec.scale)


class BlockAttentionLayer(nn.Module):
    """The projections and attention of a `BlockAttention`."""

    def __init__(self, spec: BlockAttention, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        size = spec.heads * spec.head_dim
        self.qkv = Linear(hidden, size, size, size)
        self.out = Linear(size, hidden, bias=True)
        self.distances = nn.Parameter(torch.empty(2 * spec.reach + 1, spec.head_dim), requires_grad=False)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(positions, hidden) to (positions, hidden)."""
        assert step.cu_seqlens is not None
        heads, block = self.spec.heads, self.spec.block
        q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, 1))
        attended = []
        for begin, end in itertools.pairwise(step.cu_seqlens.tolist()):
            whole = end - (end - begin) % block
            if whole > begin:
                blocks = (part[:, begin:whole].unflatten(1, (-1, block)).transpose(0, 1) for part in (q, k, v))
                attended.append(self._attend(*blocks).transpose(0, 1).flatten(1, 2))
            if end > whole:
                attended.append(self._attend(*(part[None, :, whole:end] for part in (q, k, v)))[0])
        out: Tensor = self.out(torch.cat(attended, 1).transpose(0, 1).flatten(1))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of blocks (blocks, heads, positions, head_dim) to themselves."""
        length, middle = q.shape[2], self.spec.reach
        keys = self.distances[middle - length + 1 : middle + length].flip(0)
        bias = _by_distance(torch.matmul(q, keys.T)) * self.spec.scale
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.spec.scale)


def _by_distance(scores: Tensor) -> Tensor:
    """Scores of keys from scores of distances.

    Args:
        scores: (..., length, 2 * length - 1), of each query for the distances length - 1 to 1 - length.

    Returns:
        (..., length, length), of each query for the keys: the distance of a query at i to the key at j is i - j.
    """
    length = scores.shape[-2]
    # The row of a query at i begins with the distance length - 1; that of the key at 0 is i.
    rows = F.pad(scores, (1, 0))
    shifted: Tensor = rows.flatten(-2)[..., length:].unflatten(-1, (length, -1))
    return shifted[..., :length]


def sinusoids(distances: range, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(distances, hidden): vectors of distances, position of the query minus that of the key."""
    powers = torch.arange(0, hidden, 2, dtype=torch.float32, device=device) / hidden
    numbers = torch.arange(distances.start, distances.stop, distances.step, dtype=torch.float32, device=device)
    phase = numbers[:, None] * (1.0 / _BASE**powers)
    return torch.stack((phase.sin(), phase.cos()), -1).flatten(1)[:, :hidden].to(dtype)

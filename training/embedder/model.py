"""BERT in plain torch, for training on a CPU: bf16 matrix products, fp32 weights.

Parameter names are those of Hugging Face's ``BertModel``, so the state dict is exported almost unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.embedder.recipe import Shape


@dataclass(frozen=True)
class Group:
    """Texts of similar length: padded tokens, a mask that is false for padding, and the first position."""

    ids: Tensor
    mask: Tensor
    start: int = 0


class Embeddings(nn.Module):
    """Embeddings of tokens, positions and token types; training uses the first type only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(2, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.norm_eps)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings of tokens at positions."""
        added = self.word_embeddings(ids) + self.position_embeddings(positions) + self.token_type_embeddings.weight[0]
        normed: Tensor = self.LayerNorm(added)
        return normed


class SelfAttention(nn.Module):
    """Projections of queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))


class Added(nn.Module):
    """A projection whose output is added to the residual stream, which is then normalized."""

    def __init__(self, inner: int, width: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Project, add and normalize."""
        normed: Tensor = self.LayerNorm(residual + linear(self.dense, x).float())
        return normed


class Attention(nn.Module):
    """Weights of one attention block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self = SelfAttention(shape.width)
        self.output = Added(shape.width, shape.width, shape.norm_eps)


class Intermediate(nn.Module):
    """The first projection of the feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.inner)


class Layer(nn.Module):
    """One encoder layer, with the norms behind the sums."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dtype = shape.heads, dtype
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = Added(shape.inner, shape.width, shape.norm_eps)

    def forward(self, x: Tensor, shapes: list[torch.Size], biases: list[Tensor | None]) -> Tensor:
        """Apply attention and feed-forward to the tokens of groups of texts; ``biases`` are added to the scores."""
        attention = self.attention.self
        weight = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]).to(self.dtype)
        added = torch.cat([attention.query.bias, attention.key.bias, attention.value.bias]).to(self.dtype)
        projected = F.linear(x.to(self.dtype), weight, added)
        parts = projected.split([shape.numel() for shape in shapes])
        attended = [self._attend(part, shape, bias) for part, shape, bias in zip(parts, shapes, biases, strict=True)]
        x = self.attention.output(torch.cat(attended), x)
        result: Tensor = self.output(F.gelu(linear(self.intermediate.dense, x.to(self.dtype))), x)
        return result

    def _attend(self, projected: Tensor, shape: torch.Size, bias: Tensor | None) -> Tensor:
        size = projected.shape[-1] // (3 * self.heads)
        heads = projected.view(*shape, 3 * self.heads, size).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        scores = ((query * size**-0.5) @ key.transpose(-1, -2)).float()
        shares = torch.softmax(scores if bias is None else scores + bias, dim=-1).to(self.dtype)
        return (shares @ value).transpose(1, 2).reshape(shape.numel(), self.heads * size)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer in the data type of its input."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


class Encoder(nn.Module):
    """The layers."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(shape, dtype) for _ in range(shape.layers))


class Embedder(nn.Module):
    """The complete model; a text's embedding is the mean over its tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.encoder = Encoder(shape, dtype)
        self._init_weights()

    def _init_weights(self) -> None:
        depth_scale = (2 * self.shape.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if "embeddings" in name else 0.5 * self.shape.width**-0.5
                nn.init.normal_(weight, std=scale * depth_scale if "output.dense" in name else scale)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, groups: Sequence[Group]) -> Tensor:
        """Return the mean final state of each text, group by group.

        Attention runs on each group, everything else on all tokens at once.
        """
        shapes = [group.ids.shape for group in groups]
        ids = torch.cat([group.ids.flatten() for group in groups])
        positions = torch.cat([_positions(group).flatten() for group in groups])
        x = self.embeddings(ids, positions)
        biases = [
            None if bool(group.mask.all()) else torch.where(group.mask, 0.0, -1e9)[:, None, None, :] for group in groups
        ]
        for layer in self.encoder.layer:
            x = layer(x, shapes, biases)
        parts = x.split([shape.numel() for shape in shapes])
        return torch.cat([_mean(part.view(*shape, -1), group.mask)
                          for part, shape, group in zip(parts, shapes, groups, strict=True)])  # fmt: skip


def _positions(group: Group) -> Tensor:
    return torch.arange(group.start, group.start + group.ids.shape[1]).expand(group.ids.shape)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask.float().unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1)

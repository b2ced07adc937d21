"""BERT in plain torch, for training on a CPU: bf16 matrix products, fp32 weights.

Parameter names are those of Hugging Face's ``BertModel``, so the state dict is exported almost unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.embedder.recipe import Shape


class Embeddings(nn.Module):
    """Embeddings of tokens, positions and token types; training uses the first type only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(2, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.norm_eps)

    def forward(self, ids: Tensor, start: int) -> Tensor:
        """Return the embeddings of tokens whose first position is ``start``."""
        positions = self.position_embeddings.weight[start : start + ids.shape[1]]
        normed: Tensor = self.LayerNorm(self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0])
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

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply attention and feed-forward; ``bias`` is added to the attention scores."""
        batch, length, width = x.shape
        own = self.attention.self
        weight = torch.cat([own.query.weight, own.key.weight, own.value.weight]).to(self.dtype)
        added = torch.cat([own.query.bias, own.key.bias, own.value.bias]).to(self.dtype)
        heads = F.linear(x.to(self.dtype), weight, added).view(batch, length, 3 * self.heads, width // self.heads)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        scores = ((query * (width // self.heads) ** -0.5) @ key.transpose(-1, -2)).float()
        shares = torch.softmax(scores if bias is None else scores + bias, dim=-1).to(self.dtype)
        attended = (shares @ value).transpose(1, 2).reshape(batch, length, width)
        x = self.attention.output(attended, x)
        inner = F.gelu(linear(self.intermediate.dense, x.to(self.dtype)))
        result: Tensor = self.output(inner, x)
        return result


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

    def forward(self, ids: Tensor, mask: Tensor, start: int = 0) -> Tensor:
        """Return the mean final state of each text; ``mask`` is false for padding."""
        x = self.embeddings(ids, start)
        bias = None if bool(mask.all()) else torch.where(mask, 0.0, -1e9)[:, None, None, :]
        for layer in self.encoder.layer:
            x = layer(x, bias)
        weights = mask.float().unsqueeze(-1)
        return (x * weights).sum(1) / weights.sum(1)

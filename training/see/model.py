"""Idefics3 in plain torch: a tower of patches, a connector that joins them two by two, and a Llama decoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.see.drawing import WHAT, WHICH
from training.see.recipe import Shape

LAYER_NORM_EPS, RMS_NORM_EPS = 1e-6, 1e-5
ROPE_THETA = 10_000.0
CHANNELS = 3
_POSITION_SCALE = 0.5  # of the first positions: as large as what is added to them


def linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a linear layer in a data type."""
    return F.linear(x.to(dtype), layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))


class TowerAttention(nn.Module):
    """Attention among the patches of a picture."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dtype = shape.heads, dtype
        self.q_proj, self.k_proj = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, shape.width)
        self.v_proj, self.out_proj = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(pictures, patches, width) to the same."""
        query, key, value = (
            linear(layer, x, self.dtype).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attended(query, key, value)
        return linear(self.out_proj, mixed.transpose(1, 2).flatten(2), self.dtype)


class TowerMlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.tower_inner), nn.Linear(shape.tower_inner, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(pictures, patches, width) to the same."""
        return linear(self.fc2, F.gelu(linear(self.fc1, x, self.dtype), approximate="tanh"), self.dtype)


class TowerLayer(nn.Module):
    """A layer of the tower."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(shape.width, LAYER_NORM_EPS) for _ in range(2))
        self.self_attn, self.mlp = TowerAttention(shape, dtype), TowerMlp(shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(pictures, patches, width) to the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        grown: Tensor = x + self.mlp(self.layer_norm2(x))
        return grown


class Tower(nn.Module):
    """From pixels to the states of patches."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        # A matrix and no convolution, so that it is one for the optimizer.
        self.patches = nn.Linear(CHANNELS * shape.patch**2, shape.width)
        self.positions_embed = nn.Embedding(shape.grid**2, shape.width)
        self.layers = nn.ModuleList(TowerLayer(shape, dtype) for _ in range(shape.tower_layers))
        self.post_layernorm = nn.LayerNorm(shape.width, LAYER_NORM_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """Uint8 (pictures, side, side, 3) to (pictures, patches, width)."""
        grid, patch = self.shape.grid, self.shape.patch
        values = pixels.float() / 127.5 - 1
        divided = values.unflatten(2, (grid, patch)).unflatten(1, (grid, patch))
        patches = divided.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        x = linear(self.patches, patches, self.dtype).float() + self.positions_embed.weight
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.post_layernorm(x)
        return normed


class DecoderAttention(nn.Module):
    """Attention among tokens, with rotary positions."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dtype = shape.heads, dtype
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """(sequences, tokens, width) to the same; ``rope``: cosines and sines; ``bias``: added to the scores."""
        query, key, value = (
            linear(layer, x, self.dtype).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attended(rotated(query, rope), rotated(key, rope), value, bias)
        return linear(self.o_proj, mixed.transpose(1, 2).flatten(2), self.dtype)


class DecoderMlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.gate_proj, self.up_proj = (nn.Linear(shape.width, shape.decoder_inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.decoder_inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(sequences, tokens, width) to the same."""
        gated = F.silu(linear(self.gate_proj, x, self.dtype)) * linear(self.up_proj, x, self.dtype)
        return linear(self.down_proj, gated, self.dtype)


class DecoderLayer(nn.Module):
    """A layer of the decoder."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(shape.width, RMS_NORM_EPS) for _ in range(2))
        self.self_attn, self.mlp = DecoderAttention(shape, dtype), DecoderMlp(shape, dtype)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """(sequences, tokens, width) to the same."""
        x = x + self.self_attn(self.input_layernorm(x), rope, bias)
        grown: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return grown


class Decoder(nn.Module):
    """From embeddings to states of tokens."""

    def __init__(self, shape: Shape, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size, self.dtype = shape.width // shape.heads, dtype
        self.embed_tokens = nn.Embedding(vocabulary, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape, dtype) for _ in range(shape.decoder_layers))
        self.norm = nn.RMSNorm(shape.width, RMS_NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Return the states; see `Step` for positions and segments."""
        rates = ROPE_THETA ** (-torch.arange(0, self.head_size, 2) / self.head_size)
        angles = (positions[..., None] * rates).repeat(1, 1, 2)[:, None]
        rope = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        length = positions.shape[1]
        seen = segments[:, None, :]
        mask = ((seen == 0) | (seen == segments[:, :, None])) & torch.ones(length, length, dtype=torch.bool).tril()
        bias = torch.where(mask, 0.0, -1e9).to(self.dtype)[:, None]
        for layer in self.layers:
            x = layer(x, rope, bias)
        normed: Tensor = self.norm(x)
        return normed


class See(nn.Module):
    """The complete model. The output matrix is the token embedding; the heads of patches are for training only."""

    def __init__(self, shape: Shape, vocabulary: int, image: int, dtype: torch.dtype = torch.bfloat16) -> None:
        """``image``: the token that stands for each embedding of a picture."""
        super().__init__()
        self.shape, self.vocabulary, self.image, self.dtype = shape, vocabulary, image, dtype
        self.tower = Tower(shape, dtype)
        self.connector = nn.Linear(shape.width * shape.join**2, shape.width, bias=False)
        self.decoder = Decoder(shape, vocabulary, dtype)
        # Heads. "embed" in their names gives them AdamW and small first weights, as embeddings have.
        self.what_embed = nn.Linear(shape.width, len(WHAT))
        self.which_embed = nn.Linear(shape.width, len(WHICH))
        self.middle_embed = nn.Linear(shape.width, 2)
        self._init_weights()

    def _init_weights(self) -> None:
        depths = {"tower": self.shape.tower_layers, "decoder": self.shape.decoder_layers}
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if "embed" in name else 0.7 * weight.shape[1] ** -0.5
                if name.endswith(("out_proj.weight", "o_proj.weight", "fc2.weight", "down_proj.weight")):
                    scale *= (2 * depths[name.partition(".")[0]]) ** -0.5
                nn.init.normal_(weight, std=scale)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        # Patches have to be able to find their neighbours from the first step on.
        with torch.no_grad():
            self.tower.positions_embed.weight.copy_(_POSITION_SCALE * waves(self.shape.grid, self.shape.width))

    def forward(self, pixels: Tensor, tokens: Tensor, positions: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return states of tokens (sequences, length, width) and of patches (sequences, patches, width)."""
        patches = self.tower(pixels)
        grid, join = self.shape.grid // self.shape.join, self.shape.join
        joined = patches.unflatten(1, (grid, join, grid, join)).transpose(2, 3).flatten(3).flatten(1, 2)
        pictures = linear(self.connector, joined, self.dtype).float()
        # The n-th image token of a sequence is the n-th embedding of its picture.
        is_image = tokens == self.image
        at = (is_image.cumsum(1) - 1).clamp(min=0)
        spread = pictures.gather(1, at[..., None].expand(-1, -1, pictures.shape[2]))
        x = torch.where(is_image[..., None], spread, self.decoder.embed_tokens(tokens))
        return self.decoder(x, positions, segments), patches

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the next token for states of the decoder."""
        return F.linear(states.to(self.dtype), self.decoder.embed_tokens.weight.to(self.dtype)).float()

    def classes(self, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of what patches show, in which colour, and whether they hold the middle of something."""
        what, which, middle = (
            linear(head, patches, self.dtype).float() for head in (self.what_embed, self.which_embed, self.middle_embed)
        )
        return what, which, middle


def waves(grid: int, width: int) -> Tensor:
    """Return sines and cosines of rows, then of columns, at wavelengths of 3 to 48 patches; (grid * grid, width)."""
    rates = 2 * math.pi / (3.0 * 16.0 ** torch.linspace(0, 1, width // 4))
    angles = torch.arange(grid)[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([line[:, None].expand(-1, grid, -1), line[None].expand(grid, -1, -1)], dim=2).flatten(0, 1)


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention in single steps: on a CPU their gradients are faster than those of the fused one."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ value


def rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of heads by their positions, as Llama does."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin

"""Whisper in plain torch, with the parameter names of transformers' WhisperModel. Windows may be short."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.hear.recipe import Shape

_EPS = 1e-5
_KERNEL = 3  # columns of a convolution


def linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a linear layer in a data type."""
    return F.linear(x.to(dtype), layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))


class Attention(nn.Module):
    """Attention with biases, except of keys."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dtype = heads, dtype
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend from x (batch, tokens, width) to memory (batch, positions, width). `bias`: added to the scores."""
        query, key, value = (
            linear(layer, states, self.dtype).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, states in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        shares = torch.softmax(scores if bias is None else scores + bias.to(self.dtype), dim=-1)
        return linear(self.out_proj, (shares @ value).transpose(1, 2).flatten(2), self.dtype)


class Layer(nn.Module):
    """A layer of the encoder or, with `cross`, of the decoder."""

    def __init__(self, shape: Shape, dtype: torch.dtype, *, cross: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.self_attn = Attention(shape.width, shape.heads, dtype)
        self.self_attn_layer_norm = nn.LayerNorm(shape.width, _EPS)
        if cross:
            self.encoder_attn = Attention(shape.width, shape.heads, dtype)
            self.encoder_attn_layer_norm = nn.LayerNorm(shape.width, _EPS)
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
        self.final_layer_norm = nn.LayerNorm(shape.width, _EPS)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the states behind the layer."""
        normed = self.self_attn_layer_norm(x)
        x = x + self.self_attn(normed, normed, bias)
        if memory is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory)
        grown = F.gelu(linear(self.fc1, self.final_layer_norm(x), self.dtype))
        return x + linear(self.fc2, grown, self.dtype)


class Convolution(nn.Module):
    """A convolution over three columns, as a matrix product: its weight is a matrix for the optimizer."""

    def __init__(self, channels: int, width: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stride, self.dtype = stride, dtype
        self.weight = nn.Parameter(torch.empty(width, channels * _KERNEL))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, columns, channels) to (batch, columns / stride, width)."""
        windows = F.pad(x.to(self.dtype), (0, 0, 1, 1)).unfold(1, _KERNEL, self.stride).flatten(2)
        return F.gelu(F.linear(windows, self.weight.to(self.dtype), self.bias.to(self.dtype)))


class Encoder(nn.Module):
    """From spectrograms to states."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv1 = Convolution(shape.mels, shape.width, 1, dtype)
        self.conv2 = Convolution(shape.width, shape.width, 2, dtype)
        self.embed_positions = nn.Embedding.from_pretrained(sinusoids(shape.positions, shape.width))
        self.layers = nn.ModuleList(Layer(shape, dtype, cross=False) for _ in range(shape.encoder_layers))
        self.layer_norm = nn.LayerNorm(shape.width, _EPS)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, columns, mels) to (batch, columns / 2, width)."""
        x = self.conv2(self.conv1(features)).float()
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.layer_norm(x)
        return normed


class Decoder(nn.Module):
    """From tokens and the encoder's states to states of tokens."""

    def __init__(self, shape: Shape, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, shape.width)
        self.embed_positions = nn.Embedding(shape.targets, shape.width)
        self.layers = nn.ModuleList(Layer(shape, dtype, cross=True) for _ in range(shape.decoder_layers))
        self.layer_norm = nn.LayerNorm(shape.width, _EPS)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, width)."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens) + self.embed_positions.weight[:length]
        bias = torch.full((length, length), -1e9).triu(1)
        for layer in self.layers:
            x = layer(x, memory, bias)
        normed: Tensor = self.layer_norm(x)
        return normed


class Hear(nn.Module):
    """The complete model; the output matrix is that of the token embedding. `ctc_embed` is for training only."""

    def __init__(self, shape: Shape, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.vocabulary, self.dtype = shape, vocabulary, dtype
        self.encoder = Encoder(shape, dtype)
        self.decoder = Decoder(shape, vocabulary, dtype)
        self.ctc_embed = nn.Linear(shape.width, shape.text_tokens + 1)
        self._init_weights()

    def _init_weights(self) -> None:
        depth_scale = (2 * self.shape.encoder_layers) ** -0.5
        for name, weight in self.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.ndim == 2:
                # The convolutions' output has to be as large as the positions that are added to it.
                gain = 2.5 if "conv" in name else 0.7
                scale = 0.02 if "embed" in name else gain * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=scale * depth_scale if "out_proj" in name or "fc2" in name else scale)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of tokens (batch, tokens, vocabulary), and of the encoder's positions (batch, positions, text + 1)."""
        memory = self.encoder(features)
        states = self.decoder(tokens, memory)
        logits = F.linear(states.to(self.dtype), self.decoder.embed_tokens.weight.to(self.dtype)).float()
        return logits, linear(self.ctc_embed, memory, self.dtype).float()


def sinusoids(length: int, width: int) -> Tensor:
    """Whisper's positions of the encoder: sines of rising wavelengths, then cosines; (length, width)."""
    rates = torch.exp(-torch.log(torch.tensor(10_000.0)) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)

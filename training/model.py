"""The Llama model in plain torch, for training on a CPU: bf16 matrix products, fp32 weights.

Parameter names are those of Hugging Face's ``LlamaForCausalLM``, so the state dict is exported unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_UNFUSED_LENGTH = 192  # up to this length matrix products are faster than torch's fused attention on a CPU


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of the model."""

    vocabulary: int
    width: int = 256
    layers: int = 6
    heads: int = 4
    inner: int = 704
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    positions: int = 2048

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to unit mean square, computed in fp32."""
        x32 = x.float()
        scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Weights of one attention block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))


class Mlp(nn.Module):
    """Weights of one gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_width, self.inner = shape.heads, shape.head_width, shape.inner
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape.width)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape.width, shape.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention and MLP, each with a residual connection."""
        batch, length, width = x.shape
        attn = self.self_attn
        qkv_weight = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]).to(x.dtype)
        qkv = (
            F.linear(self.input_layernorm(x), qkv_weight)
            .view(batch, length, 3 * self.heads, self.head_width)
            .transpose(1, 2)
        )
        query, key, value = qkv.chunk(3, dim=1)
        attended = causal_attention(apply_rope(query, cos, sin), apply_rope(key, cos, sin), value)
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, width), attn.o_proj.weight.to(x.dtype))
        gate_up = torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight]).to(x.dtype)
        gate, up = F.linear(self.post_attention_layernorm(x), gate_up).split(self.inner, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.mlp.down_proj.weight.to(x.dtype))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (RoPE) in Hugging Face's layout of halves."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention."""
    length = query.shape[-2]
    if length > MAX_UNFUSED_LENGTH:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return torch.softmax(scores.float().masked_fill(future, -1e9), dim=-1).to(value.dtype) @ value


class Trunk(nn.Module):
    """Embedding, layers and final norm (the ``model.`` part of the Hugging Face names)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.norm_eps)


class Nano(nn.Module):
    """The complete model; input and output embeddings are tied."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Trunk(shape)
        self._forward: Callable[..., Tensor] = Block.forward
        self._init_weights()

    def _init_weights(self) -> None:
        depth_scale = (2 * self.shape.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if "embed" in name else self.shape.width**-0.5 * 0.5
                if "o_proj" in name or "down_proj" in name:
                    scale *= depth_scale
                nn.init.normal_(weight, std=scale)

    def compile(self) -> None:
        """Compile one layer; all layers share the compiled code."""
        torch._dynamo.config.cache_size_limit = 64
        self._forward = torch.compile(Block.forward, dynamic=False)

    def positions(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary embedding."""
        half = torch.arange(0, self.shape.head_width, 2).float() / self.shape.head_width
        angles = torch.outer(torch.arange(length).float(), self.shape.rope_theta**-half)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the final hidden states."""
        cos, sin = self.positions(ids.shape[1])
        x = self.model.embed_tokens(ids).to(self.dtype)
        for layer in self.model.layers:
            x = self._forward(layer, x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def loss(self, ids: Tensor, loss_mask: Tensor, teacher: Nano | None = None, taught: Tensor | None = None) -> Tensor:
        """Return the mean cross entropy of the tokens in the loss mask.

        In the rows ``taught`` (booleans), half of it is replaced by the divergence from the ``teacher``'s predictions.
        """
        mask = loss_mask[:, 1:]
        logits = self.logits(self.hidden(ids)[:, :-1][mask])
        losses = F.cross_entropy(logits, ids[:, 1:][mask], reduction="none")
        if teacher is None or taught is None or not taught.any():
            return losses.mean()
        tokens = taught[:, None].expand_as(mask)[mask]
        with torch.no_grad():
            teacher_logprobs = teacher.logits(teacher.hidden(ids[taught])[:, :-1][mask[taught]]).log_softmax(-1)
        apart = F.kl_div(logits[tokens].log_softmax(-1), teacher_logprobs, reduction="none", log_target=True).sum(-1)
        return (losses[~tokens].sum() + (losses[tokens] + apart).sum() / 2) / len(losses)

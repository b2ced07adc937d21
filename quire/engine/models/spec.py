"""DecoderSpec: the architecture of a decoder.

Fields describe operations, never model names. New control flow gets a new type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class DynamicNtk:
    """RoPE whose base grows with the position beyond the trained length ("dynamic NTK")."""

    theta: float
    factor: float
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """RoPE with other frequencies for sequences that are longer than those of the training."""

    inv_freq: tuple[float, ...]
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `dim` elements of a head.

    Attributes:
        inv_freq: dim / 2 inverse frequencies, with the config's scaling applied.
        factor: multiplies cosine and sine (YaRN, LongRoPE).
        interleaved: rotates pairs of adjacent elements instead of pairs across the two halves.
        extension: replaces `inv_freq` beyond the trained length.
    """

    dim: int
    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    extension: DynamicNtk | LongRope | None = None


class QKNorm(Enum):
    """Elements over which queries and keys are normalized."""

    HEAD = "each head"
    ALL = "all heads together"


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention: `heads` query heads share `kv_heads` key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None  # None: no position embedding
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int | None = None  # number of positions that a query attends to, including its own
    softcap: float | None = None
    sinks: bool = False  # a learned logit per head is added to the softmax's denominator


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one cached vector of kv_rank + rope.dim elements for keys and values."""

    heads: int
    q_rank: int | None  # None: queries are projected in one step
    kv_rank: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    size: int
    act: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """Selects the top_k experts by the softmax of the router's logits."""

    renormalize: bool = True  # the weights of the selected experts sum to 1
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupedSigmoidRouter:
    """Selects groups by the sum of their two highest sigmoid scores, then the top_k experts in these groups."""

    groups: int
    top_groups: int
    renormalize: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class GatedExperts:
    """Experts that are gated MLPs without biases."""

    act: str = "silu"


@dataclass(frozen=True, kw_only=True)
class ClampedSwigluExperts:
    """Experts with biases: (clamp(up) + 1) * g * sigmoid(alpha * g), g = clamp(gate)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts of width `size`, and a shared expert of width `shared`; 0 for no shared expert."""

    size: int
    experts: int
    top_k: int
    router: SoftmaxRouter | GroupedSigmoidRouter
    expert: GatedExperts | ClampedSwigluExperts = GatedExperts()
    shared: int = 0


Attention = GroupedAttention | LatentAttention
FeedForward = GatedMLP | MoE


@dataclass(frozen=True, kw_only=True)
class Layer:
    """x + scale * post(attn(pre(x))), and the same with ffn; pre and post are norms, if enabled."""

    attn: Attention
    ffn: FeedForward
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only language model.

    Attributes:
        norm_offset: added to every norm's weight (gemma stores w - 1).
        tied: the output projection shares the embedding's weight.
        logit_softcap: logits become cap * tanh(logits / cap).
    """

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    eps: float
    max_positions: int
    norm_offset: float = 0.0
    tied: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """How FP8 weights are scaled.

    Attributes:
        block: rows and columns that share a scale; None: one scale for all of a weight.
    """

    block: tuple[int, int] | None = (128, 128)

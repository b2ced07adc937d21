"""DecoderSpec: what the math of a decoder is. A field names math, never a model; new control flow is a new type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class DynamicNtk:
    """Rope whose base grows with the position once it is past the trained length ("dynamic NTK")."""

    theta: float
    factor: float
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """Other frequencies for context lengths beyond the trained one."""

    inv_freq: tuple[float, ...]
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `dim` numbers of a head.

    Attributes:
        inv_freq: dim / 2 inverse frequencies, already scaled as the checkpoint asks.
        factor: multiplies cosine and sine (yarn, longrope).
        interleaved: neighbours are pairs, instead of the two halves.
        extension: what replaces `inv_freq` beyond the trained length.
    """

    dim: int
    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    extension: DynamicNtk | LongRope | None = None


class QKNorm(Enum):
    """Over what queries and keys are normalised."""

    HEAD = "each head"
    ALL = "all heads together"


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Softmax attention in which `heads` queries share `kv_heads` keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None  # none: no positions at all
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int | None = None  # a query sees so many positions, its own included
    softcap: float | None = None
    sinks: bool = False  # a learnt logit per head joins the softmax and takes its share away


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from one cached vector of kv_rank + rope.dim numbers."""

    heads: int
    q_rank: int | None  # none: queries are projected at once
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
    """The top_k experts by softmax of the router's logits."""

    renormalise: bool = True  # the chosen weights sum to 1
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupedSigmoidRouter:
    """Sigmoid scores; the best groups by the sum of their two best experts, then the best experts in these."""

    groups: int
    top_groups: int
    renormalise: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class GatedExperts:
    """Experts that are gated MLPs without bias."""

    act: str = "silu"


@dataclass(frozen=True, kw_only=True)
class ClampedSwigluExperts:
    """Experts with biases: (clamp(up) + 1) * g * sigmoid(alpha * g), g = clamp(gate)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts, each of width `size`, and one that always runs of width `shared`."""

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
    """x + scale * post(attn(pre(x))), and the same with ffn; pre and post are norms where they exist."""

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
        tied: the output head is the embedding.
        logit_softcap: cap * tanh(logits / cap).
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

"""MiniMax 01 and M1: linear attention with constant decays, softmax attention every few layers, experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import LLAMA, attention, decoder, head_dim, mixed_layers
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import (
    Attention,
    DecoderSpec,
    GatedExperts,
    Layer,
    MoE,
    NormedResidual,
    SoftmaxRouter,
)
from quire.engine.models.specs.linear_recurrence import DecayingAttention
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.tensor_names import LAYER, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_LINEAR = LAYER + r"self_attn\."
_RULES = (
    (_LINEAR + r"qkv_proj\.weight", "attn.inputs.weight"),
    (_LINEAR + r"out_proj\.weight", "attn.out.weight"),
    (_LINEAR + r"output_gate\.weight", "attn.gate.weight"),
    (_LINEAR + r"norm\.weight", "attn.norm.weight"),
)
_DECAYS = r"layers\.\d+\.self_attn\.(?:slope_rate|(?:query|key|diagonal)_decay)"  # which follow from the config
_NORM_EPS = 1e-6  # of the norm of linear attention


def minimax(config: Any) -> DecoderSpec:
    """MiniMax 01 and M1."""
    full = attention(config, window=config.sliding_window, rope=_rope(config))
    ffn = MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(),
        expert=GatedExperts(act=config.hidden_act),
    )
    attns = [
        _linear(config, index) if attn is not full else attn
        for index, attn in enumerate(mixed_layers(config, _linear(config, 0), full))
    ]
    return decoder(config, [Layer(attn=attn, ffn=ffn, normed_residual=_residual(config, attn)) for attn in attns])


def _rope(config: Any) -> Rope:
    """The rope of softmax attention, which rotates the first `rotary_dim` elements of each head.

    transformers' implementation reads that field for MiniMax M2 only, and rotates whole heads here.

    Raises:
        UnsupportedModel: a head has not so many elements.
    """
    dim = head_dim(config)
    rotated = getattr(config, "rotary_dim", None)
    rotated = dim if rotated is None else rotated
    if type(rotated) is not int or not 0 < rotated <= dim or rotated % 2:
        raise UnsupportedModel(f"rotary_dim must be an even number up to {dim}, the elements of a head, not {rotated}")
    return rope_of(config, rotated)


def _linear(config: Any, index: int) -> DecayingAttention:
    """Linear attention in a layer: the later the layer and the head, the longer it remembers."""
    heads = config.num_attention_heads
    depth = 1 - index / (config.num_hidden_layers - 1 + 1e-5) + 1e-5
    rates = tuple(2 ** (-8 / heads * (head + 1)) * depth for head in range(heads))
    return DecayingAttention(head_dim=head_dim(config), rates=rates, act=config.hidden_act, eps=_NORM_EPS)


def _residual(config: Any, attn: Attention) -> NormedResidual:
    kind = "linear" if isinstance(attn, DecayingAttention) else "full"
    return NormedResidual(
        attn_residual=float(getattr(config, f"{kind}_attn_alpha_factor")),
        attn_branch=float(getattr(config, f"{kind}_attn_beta_factor")),
        ffn_residual=float(config.mlp_alpha_factor),
        ffn_branch=float(config.mlp_beta_factor),
    )


def _names(spec: DecoderSpec, _: Facts) -> WeightNames:
    heads = {layer.attn.heads for layer in spec.layers if isinstance(layer.attn, DecayingAttention)}
    return replace(
        LLAMA,
        rules=(*_RULES, *LLAMA.rules),
        ignored=rf"{LLAMA.ignored}|{_DECAYS}",
        convert={"attn.inputs.weight": partial(_by_projection, max(heads, default=1))},
        prepare=unstacked("mlp"),
    )


def _by_projection(heads: int, weight: Tensor) -> Tensor:
    """All queries, keys and values one behind the other, from rows with those of each head together."""
    by_head: Tensor = weight.unflatten(0, (heads, 3, -1))
    return by_head.transpose(0, 1).flatten(0, 2)


FAMILIES = (Family(name="minimax", config_types=("minimax",), spec=minimax, tensors=_names),)

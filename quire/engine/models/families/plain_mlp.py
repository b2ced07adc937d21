"""Arcee and Apertus: Llamas whose feed-forwards have no gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.families.llama import LLAMA, biased_attention, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, LearnedMLP, PlainMLP, QKNorm
from quire.engine.models.specs.tensor_names import KIND, LAYER

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_RULES = (
    (LAYER + r"mlp\.up_proj" + KIND, "ffn.up.{kind}"),
    (LAYER + r"mlp\.act_fn\.(?P<number>alpha_p|alpha_n|beta|eps)", "ffn.{number}"),
    (LAYER + r"attention_layernorm\.weight", "attn_norm.weight"),
    (LAYER + r"feedforward_layernorm\.weight", "ffn_norm.weight"),
)


def _flat(number: Tensor) -> Tensor:
    return number.flatten()


_NAMES = replace(LLAMA, rules=(*LLAMA.rules, *_RULES), convert={"ffn.beta": _flat, "ffn.eps": _flat})


def arcee(config: Any) -> DecoderSpec:
    """Arcee: squares of relu."""
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act, bias=bool(config.mlp_bias))
    return uniform(config, biased_attention(config), ffn)


def apertus(config: Any) -> DecoderSpec:
    """Apertus: norms of heads, and an activation with learned numbers."""
    size, act = config.intermediate_size, config.hidden_act
    ffn = LearnedMLP(size=size) if act == "xielu" else PlainMLP(size=size, act=act, bias=False)
    return uniform(config, biased_attention(config, qk_norm=QKNorm.HEAD), ffn)


FAMILIES = (
    Family(name="apertus", config_types=("apertus",), spec=apertus, tensors=_NAMES),
    Family(name="arcee", config_types=("arcee",), spec=arcee, tensors=_NAMES),
)

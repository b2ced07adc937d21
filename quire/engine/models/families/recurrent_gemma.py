"""RecurrentGemma: gated linear recurrences, and attention with a window."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import LLAMA, attention
from quire.engine.models.families.mamba import MAX_POSITIONS
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Embeddings, GatedMLP, Layer, RMSNormSpec
from quire.engine.models.specs.linear_recurrence import GatedLinearRecurrence
from quire.engine.models.specs.tensor_names import KIND, LAYER, NamedTensors, taps_first

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_BLOCK = LAYER + r"temporal_block\."
_RULES = (
    (r"final_norm\.weight", "norm.weight"),
    (LAYER + r"temporal_pre_norm\.weight", "attn_norm.weight"),
    (LAYER + r"channel_pre_norm\.weight", "ffn_norm.weight"),
    (LAYER + r"mlp_block\.(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp_block\.down_proj" + KIND, "ffn.down.{kind}"),
    (_BLOCK + r"(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (_BLOCK + r"o_proj" + KIND, "attn.out.{kind}"),
    (_BLOCK + r"linear_y" + KIND, "attn.gate.{kind}"),
    (_BLOCK + r"linear_x" + KIND, "attn.inputs.{kind}"),
    (_BLOCK + r"linear_out" + KIND, "attn.out.{kind}"),
    (_BLOCK + r"conv_1d" + KIND, "attn.conv.{kind}"),
    (_BLOCK + r"rg_lru\.recurrent_param", "attn.rate"),
    (_BLOCK + r"rg_lru\.gates\.(?P<block>\d+)\.(?P<part>b|a)" + KIND, "attn.gates.{block}.{kind}"),
)
_GATE = re.compile(r"(?P<lru>.*\.rg_lru)\.(?P<gate>input|recurrent)_gate_(?P<kind>weight|bias)")
_SHARPNESS = 8.0  # of decays


def recurrent_gemma(config: Any) -> DecoderSpec:
    """RecurrentGemma.

    Raises:
        UnsupportedModel: a layer is of another kind.
    """
    kinds = list(config.layers_block_type)
    if unknown := sorted(set(config.block_types) - {"recurrent", "attention"}):
        raise UnsupportedModel(f"block_types has {unknown[0]!r}; supported are recurrent and attention")
    rope = rope_of(config, config.head_dim, partial=True)
    bias = bool(config.attention_bias)
    local = attention(config, rope=rope, window=config.attention_window_size, qkv_bias=bias, out_bias=True)
    recurrence = GatedLinearRecurrence(
        size=config.lru_width,
        blocks=config.num_attention_heads,
        width=config.conv1d_width,
        act=config.hidden_activation,
    )
    ffn = GatedMLP(size=config.intermediate_size // 2, act=config.hidden_activation, bias=True)
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(Layer(attn=recurrence if kind == "linear_attention" else local, ffn=ffn) for kind in kinds),
        norm=RMSNormSpec(eps=config.rms_norm_eps, offset=1.0),
        max_positions=getattr(config, "max_position_embeddings", None) or MAX_POSITIONS,
        tied=bool(config.tie_word_embeddings),
        embeddings=Embeddings(scale=_in_bfloat16(config.hidden_size**0.5)),
        logit_softcap=config.logits_soft_cap,
    )


def _in_bfloat16(value: float) -> float:
    """The nearest number of bfloat16, in which transformers keeps the factor of embeddings."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


def _rates(parameter: Tensor) -> Tensor:
    """Rates of channels, of the parameters whose softplus they are, times a constant."""
    import torch.nn.functional as F  # noqa: PLC0415 families are read without it

    return _SHARPNESS * F.softplus(parameter.float())


def _prepare(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The projections to gates of each block of channels, outputs before inputs."""
    for name, tensor in tensors:
        match = _GATE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        part = "b" if match["gate"] == "input" else "a"
        for block, values in enumerate(tensor):
            weight = values.t() if match["kind"] == "weight" else values
            yield f"{match['lru']}.gates.{block}.{part}.{match['kind']}", weight


_NAMES = replace(
    LLAMA,
    rules=(*_RULES, *LLAMA.rules),
    convert={"attn.conv.weight": taps_first, "attn.rate": _rates},
    prepare=_prepare,
)
FAMILIES = (Family(name="recurrent_gemma", config_types=("recurrent_gemma",), spec=recurrent_gemma, tensors=_NAMES),)

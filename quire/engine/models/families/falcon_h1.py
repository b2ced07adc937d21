"""Falcon-H1: state spaces beside attention in each layer, with factors almost everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import biased_attention, decoder, head_dim
from quire.engine.models.families.mamba import MIXER_CONVERT, head_state_space, mixer_rules
from quire.engine.models.families.mamba_hybrids import HYBRID_NAMES
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Embeddings, GatedMLP, Layer, SideBySide
from quire.engine.models.specs.state_space import GatedNorm
from quire.engine.models.specs.tensor_names import KIND, LAYER

_ATTENTION = (
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.attention.qkv.{kind}"),
    (LAYER + r"self_attn\.o_proj" + KIND, "attn.attention.out.{kind}"),
)
_NAMES = replace(
    HYBRID_NAMES,
    rules=(*HYBRID_NAMES.rules, *_ATTENTION, *mixer_rules("mamba", "attn.recurrence")),
    convert={name.replace("attn.", "attn.recurrence."): function for name, function in MIXER_CONVERT.items()},
)


def falcon_h1(config: Any) -> DecoderSpec:
    """Falcon-H1.

    Raises:
        UnsupportedModel: there is another number of factors.
    """
    gate_scale, out_scale = _factors(config, "mlp_multipliers", 2)
    norm = GatedNorm(eps=config.rms_norm_eps, gate_first=not config.mamba_norm_before_gate)
    first, second, third, fourth, fifth = _factors(config, "ssm_multipliers", 5)
    recurrence = head_state_space(
        config,
        out_bias=bool(config.projectors_bias),
        norm=norm if config.mamba_rms_norm else None,
        input_scale=float(config.ssm_in_multiplier),
        scales=(first, second, third, fourth, fifth),
    )
    attn = SideBySide(
        attention=biased_attention(config, scale=head_dim(config) ** -0.5 * config.key_multiplier),
        recurrence=recurrence,
        rope=None,
        input_scale=float(config.attention_in_multiplier),
        scale=float(config.attention_out_multiplier),
        recurrence_scale=float(config.ssm_out_multiplier),
    )
    attn = replace(attn, rope=attn.attention.rope)
    ffn = GatedMLP(
        size=config.intermediate_size,
        act=config.hidden_act,
        bias=bool(config.mlp_bias),
        gate_scale=gate_scale,
        out_scale=out_scale,
    )
    return decoder(
        config,
        [Layer(attn=attn, ffn=ffn)] * config.num_hidden_layers,
        embeddings=Embeddings(scale=float(config.embedding_multiplier)),
        logit_scale=float(config.lm_head_multiplier),
    )


def _factors(config: Any, name: str, count: int) -> Sequence[float]:
    values = getattr(config, name)
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise UnsupportedModel(f"{name} is {values!r}, but {count} numbers are expected")
    return [float(value) for value in values]


FAMILIES = (Family(name="falcon_h1", config_types=("falcon_h1",), spec=falcon_h1, tensors=_NAMES),)

"""OLMo Hybrid: layers with the gated delta rule, whose norms lie as in Llama, and attention as in OLMo 2."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.families.llama import (
    LLAMA_OUTPUT_NORMS,
    biased_attention,
    decoder,
    head_dim,
    mixed_layers,
    mlp,
)
from quire.engine.models.families.qwen3_next import delta_net
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, QKNorm
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.engine.models.specs.tensor_names import KIND, LAYER, NamedTensors, taps_first

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_EPS = 1e-5  # of the gated norm, which does not depend on the config
_LINEAR = LAYER + r"linear_attn\."
_RULES = (
    (_LINEAR + r"(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (_LINEAR + r"(?P<part>b|a)_proj" + KIND, "attn.gates.{kind}"),
    (_LINEAR + r"g_proj" + KIND, "attn.z.{kind}"),
    (_LINEAR + r"conv1d\.weight", "attn.conv"),
    (_LINEAR + r"A_log", "attn.log_rate"),
    (_LINEAR + r"dt_bias", "attn.decay_bias"),
    (_LINEAR + r"o_norm\.weight", "attn.norm"),
    (_LINEAR + r"o_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"attention_layer_norm\.weight", "attn_norm.weight"),
    (LAYER + r"feedforward_layer_norm\.weight", "attn_output_norm.weight"),
)
# Of layers without norms behind their branches, which have no parameter that an earlier rule names.
_LAST_RULES = ((LAYER + r"(?:post_attention_layernorm|feedforward_layer_norm)\.weight", "ffn_norm.weight"),)
_CONV = re.compile(r"(?P<layer>.*)\.(?P<part>q|k|v)_conv1d\.weight")


def join_convolutions(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The convolution of queries, keys and values, of which checkpoints have one each."""
    import torch  # noqa: PLC0415 families are read without it

    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        match = _CONV.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = waiting[match["layer"]]
        parts[match["part"]] = tensor.clone()  # the memory of what is read may be used again
        if len(parts) == len("qkv"):
            yield f"{match['layer']}.conv1d.weight", torch.cat([parts[part] for part in "qkv"])
            del waiting[match["layer"]]


def olmo_hybrid(config: Any) -> DecoderSpec:
    """OLMo Hybrid. Published models have no position embedding."""
    has_rope = bool(config.rope_parameters) and config.rope_parameters.get("rope_theta") is not None
    rope = rope_of(config, head_dim(config)) if has_rope else None
    linear = delta_net(config, eps=_EPS, most_beta=2.0 if config.linear_allow_neg_eigval else 1.0)
    attns = mixed_layers(config, linear, biased_attention(config, rope=rope, qk_norm=QKNorm.ALL))
    layers = [
        Layer(attn=attn, ffn=mlp(config), pre_norm=is_linear, branch_output_norm=not is_linear)
        for attn, is_linear in ((attn, isinstance(attn, GatedDeltaNet)) for attn in attns)
    ]
    return decoder(config, layers)


FAMILIES = (
    Family(
        name="olmo_hybrid",
        config_types=("olmo_hybrid",),
        spec=olmo_hybrid,
        tensors=replace(
            LLAMA_OUTPUT_NORMS,
            rules=(*_RULES, *LLAMA_OUTPUT_NORMS.rules, *_LAST_RULES),
            convert={"attn.conv": taps_first},
            prepare=join_convolutions,
        ),
    ),
)

"""GLM-4, GLM-4-0414 and GLM-4.5, without pictures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.families.deepseek import grouped_experts
from quire.engine.models.families.llama import LLAMA, attention, decoder, head_dim, mlp, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, QKNorm
from quire.engine.models.specs.tensor_names import LAYER

_OUTPUT_NORMS = (
    (LAYER + r"post_self_attn_layernorm\.weight", "attn_output_norm.weight"),
    (LAYER + r"post_mlp_layernorm\.weight", "ffn_output_norm.weight"),
)
GLM4 = replace(LLAMA, rules=(*LLAMA.rules, *_OUTPUT_NORMS))


def glm(config: Any) -> DecoderSpec:
    """GLM-4: Llama with a rope of adjacent elements in a part of each head."""
    return _glm(config, branch_output_norm=False)


def glm4(config: Any, **attn: Any) -> DecoderSpec:
    """GLM-4-0414: norms before and after each branch. `attn`: fields of attention that the config does not set."""
    return _glm(config, branch_output_norm=True, **attn)


def _glm(config: Any, *, branch_output_norm: bool, **attn: Any) -> DecoderSpec:
    rope = rope_of(config, head_dim(config), interleaved=True, partial=True)
    fields = {"qkv_bias": bool(getattr(config, "attention_bias", False)), "rope": rope, **attn}
    return uniform(config, attention(config, **fields), branch_output_norm=branch_output_norm)


def glm4_moe(config: Any) -> DecoderSpec:
    """GLM-4.5, and Solar Open without dense layers: DeepSeek's experts, dense first layers."""
    rope = rope_of(config, head_dim(config), partial=True)
    norm = QKNorm.HEAD if getattr(config, "use_qk_norm", False) else None
    attn = attention(config, qkv_bias=bool(config.attention_bias), rope=rope, qk_norm=norm)
    experts, dense = grouped_experts(config), getattr(config, "first_k_dense_replace", 0)
    layers = [
        Layer(attn=attn, ffn=mlp(config) if index < dense else experts) for index in range(config.num_hidden_layers)
    ]
    return decoder(config, layers)


FAMILIES = (
    Family(name="glm", config_types=("glm",), spec=glm, tensors=LLAMA),
    Family(name="glm4", config_types=("glm4",), spec=glm4, tensors=GLM4),
    Family(name="glm4_moe", config_types=("glm4_moe", "solar_open"), spec=glm4_moe, tensors=LLAMA),
)

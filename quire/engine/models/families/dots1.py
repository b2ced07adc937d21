"""dots.llm1."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.deepseek import grouped_experts
from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, mlp, windowed
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, QKNorm


def dots1(config: Any) -> DecoderSpec:
    """dots.llm1: Qwen 3's attention, DeepSeek's experts, dense first layers."""
    attns = windowed(config, biased_attention(config, qk_norm=QKNorm.HEAD))
    experts, dense = grouped_experts(config), config.first_k_dense_replace
    layers = [Layer(attn=attn, ffn=mlp(config) if index < dense else experts) for index, attn in enumerate(attns)]
    return decoder(config, layers)


FAMILIES = (Family(name="dots1", config_types=("dots1",), spec=dots1, tensors=LLAMA),)

"""StableLM 2 and 3."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import layer_norm_decoder, partial_rope
from quire.engine.models.families.llama import LLAMA_LAYER_NORMS, attention, mlp
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, ParallelResidual


def stablelm(config: Any) -> DecoderSpec:
    """StableLM 2 and 3: a partial rope, gated feed-forward layers, layer norms."""
    if config.qk_layernorm:
        raise UnsupportedModel("StableLM with qk_layernorm is not supported")
    attn = attention(config, rope=partial_rope(config), qkv_bias=config.use_qkv_bias)
    parallel = ParallelResidual.ONE_NORM if config.use_parallel_residual else None
    layer = Layer(attn=attn, ffn=mlp(config), parallel=parallel)
    return layer_norm_decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps)


FAMILIES = (Family(name="stablelm", config_types=("stablelm",), spec=stablelm, tensors=LLAMA_LAYER_NORMS),)

"""Qwen 3 with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, mlp
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import DecoderSpec, FeedForward, GatedExperts, Layer, MoE, QKNorm, SoftmaxRouter
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.tensor_names import NamedTensors, WeightNames


def qwen3_moe(config: Any) -> DecoderSpec:
    """Qwen 3 with experts, on every `decoder_sparse_step`-th layer that is not listed as dense."""
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=getattr(config, "norm_topk_prob", True)),  # Qwen3-VL's always does
        expert=GatedExperts(act=config.hidden_act),
    )
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    attn = biased_attention(config, qk_norm=QKNorm.HEAD, window=window)
    return decoder(config, [Layer(attn=attn, ffn=ffn) for ffn in feed_forwards(config, experts)])


def feed_forwards(config: Any, experts: MoE) -> list[FeedForward]:
    """The feed-forwards of all layers, some of which may be dense."""
    dense = set(config.mlp_only_layers or ()) if config.num_experts else set(range(config.num_hidden_layers))
    sparse = [i not in dense and (i + 1) % config.decoder_sparse_step == 0 for i in range(config.num_hidden_layers)]
    return [experts if is_sparse else mlp(config) for is_sparse in sparse]


def without_stacks(hidden: int, tensors: NamedTensors) -> NamedTensors:
    """The projections of each expert, from Qwen3-VL's tensors of all of them.

    In checkpoints as published, inputs lie before outputs; in those that transformers has saved, outputs before inputs.
    """
    divide = unstacked("mlp", inputs_first=lambda tensor, is_down: tensor.shape[1 if is_down else 2] != hidden)
    return divide(tensors)


def _vl_names(spec: DecoderSpec, _: Facts) -> WeightNames:
    return replace(LLAMA, prepare=partial(without_stacks, spec.hidden))


FAMILIES = (
    Family(name="qwen3_moe", config_types=("qwen3_moe",), spec=qwen3_moe, tensors=LLAMA),
    Family(
        name="qwen3_vl_moe_text",
        config_types=("qwen3_vl_moe_text",),
        spec=qwen3_moe,
        tensors=_vl_names,
    ),
)

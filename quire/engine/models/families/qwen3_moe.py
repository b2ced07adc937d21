"""Qwen 3 with experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, mlp
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import DecoderSpec, FeedForward, GatedExperts, Layer, MoE, QKNorm, SoftmaxRouter
from quire.engine.models.specs.tensor_names import NamedTensors, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<name>gate_up|down)_proj")


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


def without_stacks(hidden: int, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The projections of each expert, from Qwen3-VL's tensors of all of them, in which gates lie before ups.

    In checkpoints as published, inputs lie before outputs; in those that transformers has saved, outputs before inputs.
    """
    for name, tensor in tensors:
        match = _STACKED.fullmatch(name)
        if match is None or tensor.dim() != 3:
            yield name, tensor
            continue
        parts = ("gate", "up") if match["name"] == "gate_up" else ("down",)
        inputs_first = tensor.shape[1 if parts == ("down",) else 2] != hidden
        for expert, weights in enumerate(tensor.mT if inputs_first else tensor):
            for part, chunk in zip(parts, weights.tensor_split(len(parts)), strict=True):
                yield f"{match['experts']}.{expert}.{part}_proj.weight", chunk


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

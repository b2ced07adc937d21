"""Qwen3-Next and Qwen3.5: layers with the gated delta rule, and every few layers attention with gates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, head_dim, mixed_layers, mlp
from quire.engine.models.families.qwen3_moe import feed_forwards, without_stacks
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    Layer,
    MoE,
    QKNorm,
    SoftmaxRouter,
)
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.engine.models.specs.tensor_names import KIND, LAYER, NamedTensors, WeightNames, taps_first

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_LINEAR = LAYER + r"linear_attn\."
_RULES = (
    (_LINEAR + r"in_proj_qkv" + KIND, "attn.qkv.{kind}"),
    (_LINEAR + r"in_proj_z" + KIND, "attn.z.{kind}"),
    (_LINEAR + r"in_proj_(?P<part>b|a)" + KIND, "attn.gates.{kind}"),
    (_LINEAR + r"conv1d\.weight", "attn.conv"),
    (_LINEAR + r"A_log", "attn.log_rate"),
    (_LINEAR + r"dt_bias", "attn.decay_bias"),
    (_LINEAR + r"norm\.weight", "attn.norm"),
    (_LINEAR + r"out_proj" + KIND, "attn.out.{kind}"),
)
_FUSED = re.compile(r"(?P<layer>.*\.linear_attn)\.in_proj_(?P<kind>qkvz|ba)\.weight")


def check_silu(config: Any) -> None:
    """Raise UnsupportedModel for convolutions with another activation."""
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(f"convolutions of queries, keys and values with {config.hidden_act!r} are not supported")


def delta_net(config: Any, **fields: Any) -> GatedDeltaNet:
    """The layers with the gated delta rule."""
    check_silu(config)
    return GatedDeltaNet(
        key_heads=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        width=config.linear_conv_kernel_dim,
        **{"eps": config.rms_norm_eps, **fields},
    )


def _decoder(config: Any, ffns: Sequence[FeedForward]) -> DecoderSpec:
    rope = rope_of(config, head_dim(config), partial=True)
    full = biased_attention(config, rope=rope, qk_norm=QKNorm.HEAD, output_gate=True)
    attns = mixed_layers(config, delta_net(config), full)
    layers = [Layer(attn=attn, ffn=ffn) for attn, ffn in zip(attns, ffns, strict=True)]
    return decoder(config, layers, norm_offset=1.0)


def _experts(config: Any, *, renormalize: bool) -> MoE:
    return MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=renormalize),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def qwen3_next(config: Any) -> DecoderSpec:
    """Qwen3-Next: with experts on most layers."""
    return _decoder(config, feed_forwards(config, _experts(config, renormalize=config.norm_topk_prob)))


def qwen3_5(config: Any) -> DecoderSpec:
    """Qwen3.5's language model, dense."""
    return _decoder(config, [mlp(config)] * config.num_hidden_layers)


def qwen3_5_moe(config: Any) -> DecoderSpec:
    """Qwen3.5's language model with experts on all layers."""
    return _decoder(config, [_experts(config, renormalize=True)] * config.num_hidden_layers)


def _names(spec: DecoderSpec, _: Facts) -> WeightNames:
    def prepare(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        yield from _prepared(spec, tensors)

    return replace(
        LLAMA,
        rules=(*_RULES, *LLAMA.rules),
        ignored=rf"{LLAMA.ignored}|mtp\..*",
        convert={"attn.conv": taps_first},
        prepare=prepare,
    )


def _prepared(spec: DecoderSpec, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Each expert's projections alone, and the projections of Qwen3-Next in order.

    Qwen3-Next's rows are ordered by key heads: of each the query, the key, the values and the output's gates of its
    value heads; in the other tensor the beta and the decay of these.
    """
    layers = [layer.attn for layer in spec.layers if isinstance(layer.attn, GatedDeltaNet)]
    for name, tensor in without_stacks(spec.hidden, tensors):
        match = _FUSED.fullmatch(name)
        if match is None or not layers:
            yield name, tensor
            continue
        attn = layers[0]
        shared = attn.heads // attn.key_heads
        values = shared * attn.value_dim
        sizes = (attn.key_dim, attn.key_dim, values, values) if match["kind"] == "qkvz" else (shared, shared)
        if len(tensor) != attn.key_heads * sum(sizes):
            raise UnsupportedModel(
                f"{name} has {len(tensor)} rows, but the model's config.json describes {attn.key_heads * sum(sizes)}"
            )
        parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (attn.key_heads, -1)).split(sizes, 1)]
        if match["kind"] == "ba":
            for part, rows in zip("ba", parts, strict=True):
                yield f"{match['layer']}.in_proj_{part}.weight", rows
        else:
            yield f"{match['layer']}.in_proj_qkv.weight", _joined(parts[:3])
            yield f"{match['layer']}.in_proj_z.weight", parts[3]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    import torch  # noqa: PLC0415 families are read without it

    return torch.cat(tuple(parts))


FAMILIES = (
    Family(name="qwen3_next", config_types=("qwen3_next",), spec=qwen3_next, tensors=_names),
    Family(name="qwen3_5_text", config_types=("qwen3_5_text",), spec=qwen3_5, tensors=_names),
    Family(name="qwen3_5_moe_text", config_types=("qwen3_5_moe_text",), spec=qwen3_5_moe, tensors=_names),
)

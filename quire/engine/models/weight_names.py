"""Maps the names of a checkpoint's tensors to the decoder's parameters."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

_ORDER = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1, "w1": 0, "w3": 1, "w2": None}
_LAYER = r"layers\.(?P<layer>\d+)\."
_EXPERTS = _LAYER + r"(?:mlp|block_sparse_moe)\.experts\."
_KIND = r"\.(?P<kind>weight|bias)"


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint's tensor goes.

    Attributes:
        parameter: name of the decoder's parameter; with `stacked`, "{expert}" stands for the expert's index.
        part: index of the projection within a fused weight; None for all of them.
        stacked: the tensor holds all experts, input before output, and interleaves gate and up (gpt-oss).
    """

    parameter: str
    part: int | None = None
    stacked: bool = False


# Pattern -> parameter; groups: layer, kind, part (see _ORDER), expert and stacked.
_RULES = [
    (re.compile(pattern), target)
    for pattern, target in (
        (r"embed_tokens\.weight", "embed.weight"),
        (r"lm_head\.weight", "head.weight"),
        (r"norm\.weight", "norm.weight"),
        (_LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + _KIND, "attn.qkv.{kind}"),
        (_LAYER + r"self_attn\.qkv_proj" + _KIND, "attn.qkv.{kind}"),
        (_LAYER + r"self_attn\.q_proj\.weight", "attn.q_b.weight"),  # latent attention without a query rank
        (_LAYER + r"self_attn\.o_proj" + _KIND, "attn.out.{kind}"),
        (_LAYER + r"self_attn\.(?P<side>q|k)_norm\.weight", "attn.{side}_norm.weight"),
        (_LAYER + r"self_attn\.sinks", "attn.sinks"),
        (_LAYER + r"self_attn\.(?P<side>q|kv)_a_proj(?:_with_mqa)?" + _KIND, "attn.{side}_a.{kind}"),
        (_LAYER + r"self_attn\.(?P<side>q|kv)_a_layernorm\.weight", "attn.{side}_a_norm.weight"),
        (_LAYER + r"self_attn\.(?P<side>q|kv)_b_proj\.weight", "attn.{side}_b.weight"),
        (_LAYER + r"mlp\.(?P<part>gate|up)_proj" + _KIND, "ffn.gate_up.{kind}"),
        (_LAYER + r"mlp\.gate_up_proj" + _KIND, "ffn.gate_up.{kind}"),
        (_LAYER + r"mlp\.down_proj" + _KIND, "ffn.down.{kind}"),
        (_LAYER + r"mlp\.shared_experts\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
        (_LAYER + r"mlp\.shared_experts\.down_proj\.weight", "ffn.shared.down.weight"),
        (_LAYER + r"(?:mlp|block_sparse_moe)\.(?:gate|router)" + _KIND, "ffn.router.{kind}"),
        (_LAYER + r"mlp\.gate\.e_score_correction_bias", "ffn.score_bias"),
        (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
        (_EXPERTS + r"(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.{expert}.down.weight"),
        (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>w1|w3)\.weight", "ffn.experts.{expert}.gate_up.weight"),
        (_EXPERTS + r"(?P<expert>\d+)\.w2\.weight", "ffn.experts.{expert}.down.weight"),
        (_EXPERTS + r"(?P<stacked>gate_up|down)_proj", "ffn.experts.{{expert}}.{stacked}.weight"),
        (_EXPERTS + r"(?P<stacked>gate_up|down)_proj_bias", "ffn.experts.{{expert}}.{stacked}.bias"),
    )
]
# Llama's second norm precedes the feed-forward; in models with post-norms it follows the attention.
_NORM = re.compile(_LAYER + r"(?P<norm>\w+_layernorm)\.weight")
_NORMS = {
    False: {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    True: {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
}


def weight_target(name: str, parameters: Container[str], *, post_norms: bool) -> WeightTarget | None:
    """The parameter that a checkpoint's tensor belongs to; None if the model has none of that name."""
    name = name.removeprefix("model.")
    if match := _NORM.fullmatch(name):
        norm = _NORMS[post_norms].get(match["norm"])
        parameter = f"layers.{match['layer']}.{norm}.weight"
        return WeightTarget(parameter) if parameter in parameters else None
    for pattern, target in _RULES:
        if match := pattern.fullmatch(name):
            groups = match.groupdict()
            parameter = (f"layers.{groups['layer']}." if "layer" in groups else "") + target.format_map(groups)
            if parameter.replace("{expert}", "0") in parameters:
                part = _ORDER[groups["part"]] if "part" in groups else None
                return WeightTarget(parameter, part, stacked="stacked" in groups)
    return None


def unstack_experts(parameter: str, tensor: Tensor) -> Tensor:
    """A stacked tensor in our order: (experts, outputs, inputs), all gates before all ups. A view where possible."""
    if tensor.dim() == 3:
        tensor = tensor.transpose(1, 2)
    if ".gate_up." not in parameter:
        return tensor
    pairs: Tensor = tensor.unflatten(1, (-1, 2))  # (experts, size, 2, ...)
    return pairs.transpose(1, 2).flatten(1, 2)

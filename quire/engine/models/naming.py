"""Which weight of a checkpoint goes where in the decoder."""

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
class Place:
    """A parameter of the decoder, or a piece of it.

    Attributes:
        part: index of the projection within a fused weight.
        expert: index within stacked experts.
        swapped: the checkpoint stores input before output, and gate and up by turns (gpt-oss).
    """

    parameter: str
    part: int | None = None
    expert: int | None = None
    swapped: bool = False


# Pattern -> parameter; groups: layer, kind, part (see _ORDER) and expert.
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
        (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>gate|up)_proj\.weight", "ffn.experts.gate_up"),
        (_EXPERTS + r"(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.down"),
        (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>w1|w3)\.weight", "ffn.experts.gate_up"),
        (_EXPERTS + r"(?P<expert>\d+)\.w2\.weight", "ffn.experts.down"),
        (_EXPERTS + r"(?P<swapped>gate_up|down)_proj", "ffn.experts.{swapped}"),
        (_EXPERTS + r"(?P<swapped>gate_up|down)_proj_bias", "ffn.experts.{swapped}_bias"),
    )
]
# Llama's second norm stands before the feed-forward; where branches end in norms, it ends the attention's.
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


def place_of(name: str, parameters: Container[str], *, post_norms: bool) -> Place | None:
    """Where among the model's parameters a weight goes; none if there is no place for such a name."""
    name = name.removeprefix("model.")
    if match := _NORM.fullmatch(name):
        norm = _NORMS[post_norms].get(match["norm"])
        parameter = f"layers.{match['layer']}.{norm}.weight"
        return Place(parameter) if parameter in parameters else None
    for pattern, target in _RULES:
        if match := pattern.fullmatch(name):
            groups = match.groupdict()
            parameter = (f"layers.{groups['layer']}." if "layer" in groups else "") + target.format_map(groups)
            if parameter not in parameters:
                continue
            return Place(
                parameter,
                part=_ORDER[groups["part"]] if "part" in groups else None,
                expert=int(groups["expert"]) if "expert" in groups else None,
                swapped="swapped" in groups,
            )
    return None


def arrange_swapped(parameter: str, tensor: Tensor) -> Tensor:
    """Experts stored input first, gate and up by turns, in our order: output first, all gates before all ups."""
    if tensor.dim() == 3:
        tensor = tensor.transpose(1, 2)
    if "gate_up" not in parameter:
        return tensor
    # A view: (experts, size, 2, ...) with the pair moved in front.
    pairs: Tensor = tensor.unflatten(1, (-1, 2))
    return pairs.transpose(1, 2).flatten(1, 2)

"""Configs of relatives of Llama from the metadata of GGUF files: what they have besides that of all decoders.

As in `architectures`, what llama.cpp has in code is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.engine.models.checkpoint.gguf.decoder_config import EXPERTS, layer_types, num_layers
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import check_whole_heads, partial_rope, rope_of
from quire.engine.models.errors import UnsupportedModel

_SIGMOID = 2  # value of expert_gating_func
_LLAMA4_CHUNK = 8192  # of all models that were published
_LLAMA4_PERIOD = 4  # layers, of which the last has no rope
_LLAMA4_MAVERICK = 128  # experts of the model whose queries and keys are not normalized


class Relative(NamedTuple):
    """A decoder.

    Attributes:
        model_type: of the config.
        head: name of transformers' class, without "ForCausalLM".
        fields: of the config.
    """

    model_type: str
    head: str
    fields: dict[str, Any]


def _bias(facts: GgufFacts, module: str) -> bool:
    return f"blk.0.{module}.bias" in facts.shapes


def _refuse_sections(facts: GgufFacts) -> None:
    """Raise UnsupportedModel if tokens have positions of time, height and width."""
    if facts.sequence(".rope.dimension_sections"):
        raise UnsupportedModel(
            f"{facts.file} is the language model of one that reads pictures ({facts.architecture}"
            ".rope.dimension_sections), which is not supported with this architecture"
        )


def _sigmoid_experts(facts: GgufFacts) -> dict[str, Any]:
    """DeepSeek's experts, which sigmoids select.

    Raises:
        UnsupportedModel: something else selects them.
    """
    function = facts.optional_integer(".expert_gating_func")
    if function not in (None, _SIGMOID):
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.expert_gating_func is {function}, which is not supported; supported "
            f"is {_SIGMOID} (sigmoid)"
        )
    return {
        "n_routed_experts": facts.integer(".expert_count"),
        "n_shared_experts": facts.optional_integer(".expert_shared_count") or 0,
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "moe_intermediate_size": facts.integer(".expert_feed_forward_length"),
        "first_k_dense_replace": facts.optional_integer(".leading_dense_block_count") or 0,
        "routed_scaling_factor": facts.optional_number(".expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(facts.flag(".expert_weights_norm")),
        "n_group": facts.optional_integer(".expert_group_count") or 1,
        "topk_group": facts.optional_integer(".expert_group_used_count") or 1,
    }


def _apertus(facts: GgufFacts) -> Relative:
    """Apertus, whose activation has learned numbers in the metadata: see `numbers_of`."""
    check_whole_heads(facts)
    return Relative("apertus", "Apertus", {"attention_bias": _bias(facts, "attn_q"), "hidden_act": "xielu"})


def _chatglm(facts: GgufFacts) -> Relative:
    """GLM-4 9B, GLM-Edge and their predecessors."""
    fields = {
        "attention_bias": _bias(facts, "attn_q") or _bias(facts, "attn_qkv"),
        "rope_parameters": partial_rope(facts, rope_of(facts)),
    }
    return Relative("glm", "Glm", fields)


def _arcee(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    fields = {"attention_bias": _bias(facts, "attn_q"), "mlp_bias": _bias(facts, "ffn_up"), "hidden_act": "relu2"}
    return Relative("arcee", "Arcee", fields)


def _dots1(facts: GgufFacts) -> Relative:
    windows = {"sliding_window": None, "layer_types": None, "attention_bias": _bias(facts, "attn_q")}
    return Relative("dots1", "Dots1", {**windows, **_sigmoid_experts(facts)})


def _ernie(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    _refuse_sections(facts)
    return Relative("ernie4_5", "Ernie4_5", {"use_bias": _bias(facts, "attn_q")})


def _ernie_moe(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    fields = {
        "use_bias": _bias(facts, "attn_q"),
        "moe_num_experts": facts.integer(".expert_count"),
        "moe_k": facts.integer(".expert_used_count"),
        "moe_intermediate_size": facts.integer(".expert_feed_forward_length"),
        "moe_num_shared_experts": facts.optional_integer(".expert_shared_count") or 0,
        "moe_layer_start_index": facts.optional_integer(".leading_dense_block_count") or 0,
        "moe_layer_interval": facts.optional_integer(".interleave_moe_layer_step") or 1,
    }
    return Relative("ernie4_5_moe", "Ernie4_5_Moe", fields)


def _exaone_moe(facts: GgufFacts) -> Relative:
    """K-EXAONE."""
    check_whole_heads(facts)
    experts = _sigmoid_experts(facts)
    dense, layers = experts.pop("first_k_dense_replace"), num_layers(facts)
    fields = {
        "sliding_window": facts.integer(".attention.sliding_window"),
        "layer_types": layer_types(facts, 4),
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(layers)],
        "num_experts": experts.pop("n_routed_experts"),
        "num_shared_experts": experts.pop("n_shared_experts"),
        **experts,
    }
    return Relative("exaone_moe", "ExaoneMoe", fields)


def _glm4(facts: GgufFacts) -> Relative:
    """GLM-4-0414, and the language model of GLM-4.1V, without pictures, and with them: see `projector`."""
    if facts.optional_integer(".nextn_predict_layers"):  # GLM-OCR
        _refuse_sections(facts)
    rope = partial_rope(facts, rope_of(facts))
    return Relative("glm4", "Glm4", {"attention_bias": _bias(facts, "attn_q"), "rope_parameters": rope})


def _glm4moe(facts: GgufFacts) -> Relative:
    _refuse_sections(facts)
    fields = {
        "attention_bias": _bias(facts, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.shapes,
        "rope_parameters": partial_rope(facts, rope_of(facts)),
        "num_nextn_predict_layers": 0,
    }
    return Relative("glm4_moe", "Glm4Moe", {**fields, **_sigmoid_experts(facts)})


def _hunyuan(facts: GgufFacts) -> Relative:
    """Hunyuan, dense. The base of its rope is the stretched one."""
    check_whole_heads(facts)
    return Relative("hunyuan_v1_dense", "HunYuanDenseV1", {"attention_bias": _bias(facts, "attn_q")})


def _hunyuan_moe(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    size = facts.integer(".expert_feed_forward_length")
    shared = facts.optional_integer(".expert_shared_feed_forward_length")
    if shared not in (None, size):
        raise UnsupportedModel(
            f"{facts.file}: the shared expert has {shared} elements and the others {size}, which is not supported: "
            "all must have the same size"
        )
    fields = {
        "attention_bias": _bias(facts, "attn_q"),
        "intermediate_size": size,
        "num_experts": facts.integer(".expert_count"),
        "moe_topk": facts.integer(".expert_used_count"),
    }
    return Relative("hunyuan_v1_moe", "HunYuanMoEV1", fields)


def _llama4(facts: GgufFacts) -> Relative:
    """Llama 4, and MobileLLM, whose layers all have a rope and attend to all tokens."""
    check_whole_heads(facts)
    experts = facts.optional_integer(".expert_count") or 0
    dense = facts.integer(".feed_forward_length")
    fields: dict[str, Any] = {
        "intermediate_size": facts.optional_integer(".expert_feed_forward_length") or dense,
        "intermediate_size_mlp": dense,
        "num_local_experts": max(1, experts),
        "num_experts_per_tok": facts.optional_integer(".expert_used_count") or 1,
        "interleave_moe_layer_step": facts.optional_integer(".interleave_moe_layer_step") or 1,
        "attention_bias": _bias(facts, "attn_q"),
        "use_qk_norm": experts != _LLAMA4_MAVERICK,
        "attention_chunk_size": _LLAMA4_CHUNK,
        "no_rope_layer_interval": _LLAMA4_PERIOD,
    }
    if not experts:
        fields["moe_layers"] = []
    if facts.optional_integer(".attention.sliding_window") == 0:
        fields |= {"attention_chunk_size": None, "no_rope_layer_interval": facts.integer(".block_count") + 1}
    return Relative("llama4_text", "Llama4", fields)


def _minimax_m2(facts: GgufFacts) -> Relative:
    _sigmoid_experts(facts)
    fields = {
        "intermediate_size": facts.integer(".expert_feed_forward_length"),
        "num_local_experts": facts.integer(".expert_count"),
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "rope_parameters": partial_rope(facts, rope_of(facts)),
    }
    return Relative("minimax_m2", "MiniMaxM2", fields)


def _olmoe(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    if facts.optional_number(".attention.clamp_kqv"):
        raise UnsupportedModel(f"{facts.file} clips queries, keys and values, which is not supported with OLMoE")
    fields = {
        "attention_bias": _bias(facts, "attn_q"),
        "intermediate_size": facts.rows(EXPERTS),
        "num_experts": facts.integer(".expert_count"),
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": None,
    }
    return Relative("olmoe", "Olmoe", fields)


def _paddleocr(facts: GgufFacts) -> Relative:
    """The language model of PaddleOCR-VL, without pictures, and with them: see `projector`."""
    check_whole_heads(facts)
    return Relative("paddleocr_vl_text", "PaddleOCRVL", {"use_bias": _bias(facts, "attn_q")})


def _seed_oss(facts: GgufFacts) -> Relative:
    check_whole_heads(facts)
    fields = {
        "attention_bias": _bias(facts, "attn_q"),
        "attention_out_bias": _bias(facts, "attn_output"),
        "mlp_bias": _bias(facts, "ffn_gate"),
    }
    return Relative("seed_oss", "SeedOss", fields)


RELATIVES: dict[str, Callable[[GgufFacts], Relative]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "chatglm": _chatglm,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "exaone-moe": _exaone_moe,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "olmoe": _olmoe,
    "paddleocr": _paddleocr,
    "seed_oss": _seed_oss,
}

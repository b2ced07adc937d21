"""Configs of Gemma's models from the metadata of GGUF files. What llama.cpp has in code is said here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

from quire.engine.models.checkpoint.gguf.decoder_config import (
    EMBEDDING,
    FULL,
    SLIDING,
    Config,
    alternating,
    layer_types,
    num_layers,
    rms_decoder,
)
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import THETA, rope_of
from quire.engine.models.errors import BrokenFolder

_ROPE_FREQS, _LAYER_EMBEDDINGS = "rope_freqs.weight", "per_layer_token_embd.weight"
_NEVER = 1e29  # divisors of frequencies from there on: pairs of elements that are not rotated
_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are scaled by the width of all heads


def _gemma(facts: GgufFacts) -> Config:
    return rms_decoder(facts, "gemma", "Gemma", head_dim=facts.head_dim, hidden_act="gelu_pytorch_tanh")


def _gemma2(facts: GgufFacts) -> Config:
    layers = num_layers(facts)
    return rms_decoder(
        facts,
        "gemma2",
        "Gemma2",
        head_dim=facts.head_dim,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=_gemma_scalar(facts),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=alternating(layers, 2),
        attn_logit_softcapping=facts.optional_number(".attn_logit_softcapping"),
        final_logit_softcapping=facts.optional_number(".final_logit_softcapping"),
    )


def _gemma3(facts: GgufFacts) -> Config:
    local = facts.optional_number(".rope.freq_base_swa") or THETA
    return rms_decoder(
        facts,
        "gemma3_text",
        "Gemma3",
        head_dim=facts.head_dim,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=_gemma_scalar(facts),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=layer_types(facts, 6),
        final_logit_softcapping=facts.optional_number(".final_logit_softcapping"),
        rope_parameters={SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: rope_of(facts)},
    )


def _gemma_embedding(facts: GgufFacts) -> Config:
    """EmbeddingGemma, whose tokens attend in both directions. transformers halves the window of its config."""
    return {**_gemma3(facts), "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def _gemma3n(facts: GgufFacts) -> Config:
    scales = facts.sequence(".activation_sparsity_scale")
    if not all(isinstance(scale, float) for scale in scales):
        raise BrokenFolder(f"{facts.file}: gemma3n.activation_sparsity_scale must be an array of numbers")
    return {
        **_with_layer_inputs(facts, "gemma3n_text", "Gemma3n", 5),
        "head_dim": facts.head_dim,
        "rope_parameters": _gemma_ropes(facts, rope_of(facts)),
        "laurel_rank": facts.shape("blk.0.laurel_l.weight")[0],
        "altup_num_inputs": facts.integer(".altup.num_inputs"),
        "altup_active_idx": facts.integer(".altup.active_idx"),
        "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales] or None,
    }


def _gemma4(facts: GgufFacts) -> Config:
    layers = layer_types(facts, 6)
    ropes = facts.shapes.get(_ROPE_FREQS, ())
    divisors = list(facts.values(_ROPE_FREQS)) if ropes else [1.0]
    rotated = sum(divisor < _NEVER for divisor in divisors) / len(divisors)
    theta = facts.optional_number(".rope.freq_base") or THETA
    widths = _of_layers(facts, ".feed_forward_length")
    full = next((index for index, kind in enumerate(layers) if kind == FULL), 0)
    heads = _of_layers(facts, ".attention.head_count_kv")
    experts = facts.optional_integer(".expert_count") or 0
    return {
        **_with_layer_inputs(facts, "gemma4_text", "Gemma4", 6),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_key_value_heads": heads[layers.index(SLIDING) if SLIDING in layers else 0],
        "num_global_key_value_heads": heads[full],
        "head_dim": facts.optional_integer(".attention.key_length_swa") or facts.head_dim,
        "global_head_dim": facts.head_dim,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in facts.shapes,
        "rope_parameters": _gemma_ropes(
            facts, {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated}
        ),
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": facts.optional_integer(".expert_used_count"),
        "moe_intermediate_size": facts.optional_integer(".expert_feed_forward_length"),
    }


def _with_layer_inputs(facts: GgufFacts, model_type: str, head: str, period: int) -> Config:
    """What the configs of Gemma 3n and 4 have in common. Numbers that differ between layers are added to it."""
    differing = {key: _of_layers(facts, key)[0] for key in (".feed_forward_length", ".attention.head_count_kv")}
    same = {f"{facts.architecture}{key}": value for key, value in differing.items()}
    return rms_decoder(
        replace(facts, metadata={**facts.metadata, **same}),
        model_type,
        head,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=layer_types(facts, period),
        final_logit_softcapping=facts.optional_number(".final_logit_softcapping"),
        hidden_size_per_layer_input=facts.optional_integer(".embedding_length_per_layer_input") or 0,
        vocab_size_per_layer_input=facts.shapes.get(_LAYER_EMBEDDINGS, (0,))[0] or facts.shape(EMBEDDING)[0],
        num_kv_shared_layers=facts.optional_integer(".attention.shared_kv_layers") or 0,
    )


def _gemma_ropes(facts: GgufFacts, full: Config) -> Config:
    local = facts.optional_number(".rope.freq_base_swa") or THETA
    return {SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: full}


def _of_layers(facts: GgufFacts, key: str) -> list[int]:
    """The number of each layer under a key, which has one or as many as there are layers.

    Raises:
        BrokenFolder: it has another number of them.
    """
    layers, value = num_layers(facts), facts.metadata.get(facts.architecture + key)
    values = [facts.integer(key)] * layers if type(value) is int else list(facts.sequence(key))
    if len(values) != layers or any(type(number) is not int for number in values):
        raise BrokenFolder(f"{facts.file}: {facts.architecture}{key} must be an integer, or one for each layer")
    return values


def _gemma_scalar(facts: GgufFacts) -> int:
    """The number whose root scores are divided by. It is not in files."""
    if num_layers(facts) == _27B.get(facts.architecture):
        return facts.integer(".embedding_length") // facts.integer(".attention.head_count")
    return facts.head_dim


GEMMAS: dict[str, Callable[[GgufFacts], Config]] = {
    "gemma": _gemma,
    "gemma-embedding": _gemma_embedding,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
}

"""What the configs of decoders have in common, from the metadata of GGUF files."""

from __future__ import annotations

from typing import Any

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import check_whole_heads, rope_of
from quire.engine.models.errors import BrokenFolder

Config = dict[str, Any]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
SLIDING, FULL = "sliding_attention", "full_attention"  # types of layers
EXPERTS, SHARED = "blk.0.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight"


def num_layers(facts: GgufFacts) -> int:
    """Layers, of which each has tensors in the file, without those that predict further tokens.

    Raises:
        BrokenFolder: there are fewer tensors than layers, or no layers.
    """
    layers = facts.integer(".block_count") - (facts.optional_integer(".nextn_predict_layers") or 0)
    if not 0 < layers <= len(facts.shapes):
        raise BrokenFolder(f"{facts.file} has {len(facts.shapes)} tensors, but its metadata {layers} layers")
    return layers


def decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    """What the configs of all decoders have."""
    heads = facts.integer(".attention.head_count")
    return {
        "architectures": [f"{head}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": facts.integer(".embedding_length"),
        "intermediate_size": facts.optional_integer(".feed_forward_length"),
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.optional_integer(".attention.head_count_kv") or heads,
        "max_position_embeddings": facts.integer(".context_length"),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in facts.shapes,
        "rope_parameters": rope_of(facts),
        **special_tokens(facts),
        **fields,
    }


def rms_decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    """What the configs of decoders with RMS norms have."""
    eps = facts.number(".attention.layer_norm_rms_epsilon")
    return decoder(facts, model_type, head, rms_norm_eps=eps, **fields)


def special_tokens(facts: GgufFacts) -> Config:
    """Ids of special tokens, which replace those of transformers' defaults."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: facts.optional_integer(f"tokenizer.ggml.{stored}_token_id") for name, stored in names.items()}


def biases(facts: GgufFacts) -> Config:
    """Whether attention and feed-forwards have biases."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in facts.shapes,
    }


def granite_decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    """What the configs of Granite's decoders have."""
    check_whole_heads(facts)
    scale = facts.optional_number(".attention.scale")
    return rms_decoder(
        facts,
        model_type,
        head,
        attention_multiplier=facts.head_dim**-0.5 if scale is None else scale,
        embedding_multiplier=facts.optional_number(".embedding_scale") or 1.0,
        residual_multiplier=facts.optional_number(".residual_scale") or 1.0,
        logits_scaling=facts.optional_number(".logit_scale") or 1.0,
        **fields,
    )


def alternating(layers: int, period: int) -> list[str]:
    """Types of layers, of which every `period`-th attends to all positions."""
    return [SLIDING if (index + 1) % period else FULL for index in range(layers)]


def layer_types(facts: GgufFacts, period: int) -> list[str]:
    """Types of layers: as the file says, or every `period`-th attends to all positions."""
    layers, key = num_layers(facts), ".attention.sliding_window_pattern"
    stored = facts.metadata.get(facts.architecture + key)
    if stored is None or type(stored) is int:
        return alternating(layers, stored or period)
    flags = facts.sequence(key)
    if len(flags) != layers:
        raise BrokenFolder(f"{facts.file}: {facts.architecture}{key} has {len(flags)} values for {layers} layers")
    return [SLIDING if flag else FULL for flag in flags]

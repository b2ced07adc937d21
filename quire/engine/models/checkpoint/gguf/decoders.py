"""Configs of Hugging Face's kind from the metadata of GGUF files with decoders, one function for each architecture.

As in `architectures`, what llama.cpp has in code is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.models.checkpoint.gguf.decoder_config import (
    EMBEDDING,
    EXPERTS,
    FULL,
    HEAD,
    SHARED,
    SLIDING,
    Config,
    biases,
    decoder,
    granite_decoder,
    layer_types,
    num_layers,
    rms_decoder,
    special_tokens,
)
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import check_whole_heads, partial_rope, rope_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
# Groups of experts, and those that a token selects, by the number of experts: of files that are older than their keys.
_DEEPSEEK_V2_GROUPS, _DEEPSEEK_V3_GROUPS = {160: (8, 3)}, {256: (8, 4)}
_GLM_5_2_CONTEXT = 1 << 20  # models with it have layers without indexers
_STARCODER2_WINDOW = 4096  # of all models that were published; files do not have it


def _llama(facts: GgufFacts) -> Config:
    """Llama, Mistral and Mixtral, which share an architecture. Windows of Mistral's first model are not in files."""
    check_whole_heads(facts)
    dim = facts.head_dim
    experts = facts.optional_integer(".expert_count") or 0
    if experts:
        return rms_decoder(
            facts,
            "mixtral",
            "Mixtral",
            head_dim=dim,
            num_local_experts=experts,
            num_experts_per_tok=facts.integer(".expert_used_count"),
            sliding_window=None,
        )
    return rms_decoder(facts, "llama", "Llama", head_dim=dim, **biases(facts))


def _llama_embed(facts: GgufFacts) -> Config:
    """Llama whose tokens attend in both directions."""
    return {**_llama(facts), "architectures": ["LlamaModel"], "is_causal": False}


def _mistral3(facts: GgufFacts) -> Config:
    """Mistral Small 3.1 and its relatives, which are Llamas, and Ministral 3, whose queries grow with positions."""
    growth = facts.optional_number(".attention.temperature_scale")
    if not growth:
        return _llama(facts)
    check_whole_heads(facts)
    rope = {**rope_of(facts), "llama_4_scaling_beta": growth}
    multiplier = facts.optional_number(".rope.scaling.yarn_log_multiplier")
    if multiplier:
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return rms_decoder(facts, "ministral3", "Ministral3", head_dim=facts.head_dim, rope_parameters=rope)


def _qwen2(facts: GgufFacts) -> Config:
    return rms_decoder(facts, "qwen2", "Qwen2", use_sliding_window=False, head_dim=facts.head_dim)


def _qwen3(facts: GgufFacts) -> Config:
    bias = "blk.0.attn_q.bias" in facts.shapes
    return rms_decoder(facts, "qwen3", "Qwen3", use_sliding_window=False, head_dim=facts.head_dim, attention_bias=bias)


def _qwen2moe(facts: GgufFacts) -> Config:
    """Qwen 2 with experts. Older files leave out the sizes of experts."""
    sizes = {}
    for name, tensor in (("expert_feed_forward_length", EXPERTS), ("expert_shared_feed_forward_length", SHARED)):
        stored = facts.optional_integer(f".{name}")
        sizes[tensor] = facts.rows(tensor) if stored is None else stored
    return _qwen_experts(
        facts,
        "qwen2_moe",
        "Qwen2Moe",
        moe_intermediate_size=sizes[EXPERTS],
        shared_expert_intermediate_size=sizes[SHARED],
        intermediate_size=sizes[SHARED],
        norm_topk_prob=False,
        qkv_bias="blk.0.attn_q.bias" in facts.shapes,
    )


def _qwen_experts(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    """Return the config of a Qwen with experts in each layer."""
    return rms_decoder(
        facts,
        model_type,
        head,
        head_dim=facts.head_dim,
        num_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
        **fields,
    )


def _qwen3moe(facts: GgufFacts) -> Config:
    moe_size = facts.integer(".expert_feed_forward_length")
    config = _qwen_experts(facts, "qwen3_moe", "Qwen3Moe", moe_intermediate_size=moe_size, norm_topk_prob=True)
    config["intermediate_size"] = config["intermediate_size"] or config["moe_intermediate_size"]
    return config


def _phi3(facts: GgufFacts) -> Config:
    rope = rope_of(facts)
    trained = rope.get("original_max_position_embeddings", facts.integer(".context_length"))
    return rms_decoder(
        facts,
        "phi3",
        "Phi3",
        sliding_window=facts.optional_integer(".attention.sliding_window") or None,
        original_max_position_embeddings=trained,
        rope_parameters=partial_rope(facts, rope),
    )


def _phi2(facts: GgufFacts) -> Config:
    return decoder(
        facts,
        "phi",
        "Phi",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        hidden_act="gelu_new",
        qk_layernorm=False,
        rope_parameters=partial_rope(facts, rope_of(facts)),
    )


def _smollm3(facts: GgufFacts) -> Config:
    check_whole_heads(facts)
    layers = num_layers(facts)
    return rms_decoder(
        facts,
        "smollm3",
        "SmolLM3",
        no_rope_layers=[int((index + 1) % 4 != 0) for index in range(layers)],
        layer_types=[FULL] * layers,
        use_sliding_window=False,
        sliding_window=None,
        **biases(facts),
    )


def _granite(facts: GgufFacts) -> Config:
    if facts.optional_integer(".expert_count"):
        raise UnsupportedModel(
            f"{facts.file} is a Granite model with experts, which is supported with the architecture granitemoe only"
        )
    return granite_decoder(facts, "granite", "Granite", **biases(facts))


def _granitemoe(facts: GgufFacts) -> Config:
    """Granite with experts. Those with a shared one are Granite 4 without state spaces."""
    fields = {
        "num_local_experts": facts.integer(".expert_count"),
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "attention_bias": biases(facts)["attention_bias"],
    }
    shared = facts.optional_integer(".expert_shared_feed_forward_length")
    if not shared:
        return granite_decoder(facts, "granitemoe", "GraniteMoe", **fields)
    return granite_decoder(
        facts,
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **fields,
        shared_intermediate_size=shared,
        layer_types=[FULL] * num_layers(facts),
        position_embedding_type="rope",
    )


def _olmo2(facts: GgufFacts) -> Config:
    """OLMo 2, and OLMo 3, of which layers with sliding windows have a rope without a scaling."""
    window = facts.optional_integer(".attention.sliding_window")
    if not window:
        return rms_decoder(facts, "olmo2", "Olmo2", attention_bias=False)
    rope = rope_of(facts)
    local = facts.optional_number(".rope.freq_base_swa") or rope["rope_theta"]
    return rms_decoder(
        facts,
        "olmo3",
        "Olmo3",
        attention_bias=False,
        sliding_window=window,
        layer_types=layer_types(facts, 4),
        rope_parameters={SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: rope},
    )


def _exaone4(facts: GgufFacts) -> Config:
    check_whole_heads(facts)
    window = facts.optional_integer(".attention.sliding_window") or None
    types = [FULL] * num_layers(facts) if window is None else layer_types(facts, 4)
    return rms_decoder(facts, "exaone4", "Exaone4", head_dim=facts.head_dim, sliding_window=window, layer_types=types)


def _falcon(facts: GgufFacts) -> Config:
    """Falcon: models with several key heads have the new architecture."""
    kv_heads = facts.optional_integer(".attention.head_count_kv") or 1
    two_norms = "blk.0.attn_norm_2.weight" in facts.shapes
    hidden = facts.integer(".embedding_length")
    config = decoder(
        facts,
        "falcon",
        "Falcon",
        num_kv_heads=kv_heads,
        new_decoder_architecture=kv_heads > 1 or two_norms,
        num_ln_in_parallel_attn=2 if two_norms else 1 if kv_heads > 1 else None,
        multi_query=kv_heads == 1,
        parallel_attn=True,
        bias="blk.0.attn_qkv.bias" in facts.shapes,
        alibi=False,
        activation="gelu",
        layer_norm_epsilon=facts.number(".attention.layer_norm_epsilon"),
        ffn_hidden_size=facts.optional_integer(".feed_forward_length") or 4 * hidden,
    )
    return {name: value for name, value in config.items() if name not in ("num_key_value_heads", "intermediate_size")}


def _starcoder2(facts: GgufFacts) -> Config:
    return decoder(
        facts,
        "starcoder2",
        "Starcoder2",
        norm_epsilon=facts.number(".attention.layer_norm_epsilon"),
        hidden_act="gelu_pytorch_tanh",
        use_bias="blk.0.attn_q.bias" in facts.shapes,
        sliding_window=facts.optional_integer(".attention.sliding_window") or _STARCODER2_WINDOW,
    )


def _stablelm(facts: GgufFacts) -> Config:
    parallel = facts.flag(".use_parallel_residual")
    return decoder(
        facts,
        "stablelm",
        "StableLm",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        use_qkv_bias="blk.0.attn_q.bias" in facts.shapes,
        qk_layernorm="blk.0.attn_q_norm.weight" in facts.shapes,
        use_parallel_residual="blk.0.ffn_norm.weight" not in facts.shapes if parallel is None else parallel,
        rope_parameters=partial_rope(facts, rope_of(facts)),
    )


def _command_r(facts: GgufFacts) -> Config:
    return decoder(
        facts,
        "cohere",
        "Cohere",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        logit_scale=facts.number(".logit_scale"),
        use_qk_norm="blk.0.attn_q_norm.weight" in facts.shapes,
        attention_bias="blk.0.attn_q.bias" in facts.shapes,
    )


def _cohere2(facts: GgufFacts) -> Config:
    return decoder(
        facts,
        "cohere2",
        "Cohere2",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        logit_scale=facts.number(".logit_scale"),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=layer_types(facts, 4),
        attention_bias="blk.0.attn_q.bias" in facts.shapes,
    )


def _deepseek2(facts: GgufFacts) -> Config:
    """DeepSeek V2, V3 and R1, whose routers differ."""
    function, is_normed = facts.optional_integer(".expert_gating_func"), bool(facts.flag(".expert_weights_norm"))
    if function not in (None, _SOFTMAX, _SIGMOID):
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.expert_gating_func is {function}, which is not supported; supported "
            f"are {_SOFTMAX} (softmax) and {_SIGMOID} (sigmoid)"
        )
    is_v2 = function != _SIGMOID  # older files do not say it
    if is_v2 and is_normed:
        raise UnsupportedModel(
            f"{facts.file} is a DeepSeek V2 model whose experts' weights sum to 1 (deepseek2.expert_weights_norm), "
            "which is not supported"
        )
    rotated = facts.integer(".rope.dimension_count")
    keys = facts.optional_integer(".attention.key_length_mla") or facts.integer(".attention.key_length")
    values = facts.optional_integer(".attention.value_length_mla") or facts.integer(".attention.value_length")
    experts, heads = facts.integer(".expert_count"), facts.integer(".attention.head_count")
    known_groups = _DEEPSEEK_V2_GROUPS if is_v2 else _DEEPSEEK_V3_GROUPS
    groups, top_groups = known_groups.get(experts, (1, 1))
    rope = rope_of(facts)
    if (multiplier := facts.optional_number(".rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
        rope.pop("attention_factor", None)
    return rms_decoder(
        facts,
        "deepseek_v2" if is_v2 else "deepseek_v3",
        "DeepseekV2" if is_v2 else "DeepseekV3",
        num_key_value_heads=heads,
        q_lora_rank=facts.optional_integer(".attention.q_lora_rank"),
        kv_lora_rank=facts.integer(".attention.kv_lora_rank"),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=keys - rotated,
        v_head_dim=values,
        n_routed_experts=experts,
        n_shared_experts=facts.optional_integer(".expert_shared_count") or 0,
        num_experts_per_tok=facts.integer(".expert_used_count"),
        moe_intermediate_size=facts.integer(".expert_feed_forward_length"),
        first_k_dense_replace=facts.optional_integer(".leading_dense_block_count") or 0,
        routed_scaling_factor=facts.optional_number(".expert_weights_scale") or 1.0,
        norm_topk_prob=is_normed,
        n_group=facts.optional_integer(".expert_group_count") or groups,
        topk_group=facts.optional_integer(".expert_group_used_count") or top_groups,
        attention_bias=False,
        **(
            {"topk_method": "group_limited_greedy"}
            if is_v2
            else {"num_nextn_predict_layers": 0, "rope_interleave": True}
        ),
        rope_parameters=rope,
    )


def _deepseek32(facts: GgufFacts) -> Config:
    """DeepSeek V3.2: V3 whose layers attend to selected tokens."""
    return {**_indexed(facts), "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}


def _glm_dsa(facts: GgufFacts) -> Config:
    """GLM-5, of which some layers share the selection of an earlier one."""
    layers = num_layers(facts)
    flags = facts.sequence(".attention.indexer.types")[:layers]
    if not flags and facts.integer(".context_length") >= _GLM_5_2_CONTEXT:
        raise UnsupportedModel(
            f"{facts.file} does not say which of its layers have indexers (glm-dsa.attention.indexer.types)"
        )
    if flags and len(flags) < layers:
        raise BrokenFolder(f"{facts.file}: glm-dsa.attention.indexer.types has {len(flags)} values for {layers} layers")
    return {
        **_indexed(facts),
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full" if flag else "shared" for flag in flags or [True] * layers],
    }


def _indexed(facts: GgufFacts) -> Config:
    """What the configs of models have whose layers attend to selected tokens."""
    function = f"{facts.architecture}.expert_gating_func"
    config = _deepseek2(replace(facts, metadata={function: _SIGMOID, **facts.metadata}))
    if config["model_type"] != "deepseek_v3":
        raise UnsupportedModel(
            f"{facts.file}: {function} is {_SOFTMAX}, which is not supported; supported is {_SIGMOID} (sigmoid)"
        )
    layers, dense = num_layers(facts), config.pop("first_k_dense_replace")
    return {
        **config,
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(layers)],
        "layer_types": ["indexed_attention"] * layers,
        "index_n_heads": facts.integer(".attention.indexer.head_count"),
        "index_head_dim": facts.integer(".attention.indexer.key_length"),
        "index_topk": facts.integer(".attention.indexer.top_k"),
    }


def _gpt2(facts: GgufFacts) -> Config:
    positions = facts.shape("position_embd.weight")[0]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": facts.integer(".embedding_length"),
        "n_layer": num_layers(facts),
        "n_head": facts.integer(".attention.head_count"),
        "n_inner": facts.optional_integer(".feed_forward_length"),
        "n_positions": positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": facts.number(".attention.layer_norm_epsilon"),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "tie_word_embeddings": HEAD not in facts.shapes,
        **special_tokens(facts),
    }


def _gpt_neox(facts: GgufFacts) -> Config:
    parallel = facts.flag(".use_parallel_residual")
    return decoder(
        facts,
        "gpt_neox",
        "GPTNeoX",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        hidden_act="gelu",
        attention_bias="blk.0.attn_qkv.bias" in facts.shapes,
        use_parallel_residual=True if parallel is None else parallel,
        rope_parameters=partial_rope(facts, rope_of(facts)),
    )


def _bloom(facts: GgufFacts) -> Config:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": facts.integer(".embedding_length"),
        "n_layer": num_layers(facts),
        "n_head": facts.integer(".attention.head_count"),
        "seq_length": facts.integer(".context_length"),
        "layer_norm_epsilon": facts.number(".attention.layer_norm_epsilon"),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "tie_word_embeddings": HEAD not in facts.shapes,
        **special_tokens(facts),
    }


def _gpt_oss(facts: GgufFacts) -> Config:
    rope = rope_of(facts)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return rms_decoder(
        facts,
        "gpt_oss",
        "GptOss",
        head_dim=facts.head_dim,
        intermediate_size=facts.integer(".expert_feed_forward_length"),
        num_local_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=layer_types(facts, 2),
        attention_bias=True,
        rope_parameters=rope,
    )


DECODERS: dict[str, Callable[[GgufFacts], Config]] = {
    "bloom": _bloom,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "deepseek2": _deepseek2,
    "deepseek32": _deepseek32,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "glm-dsa": _glm_dsa,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "llama": _llama,
    "llama-embed": _llama_embed,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen2vl": _qwen2,  # without pictures, and with them: see `projector`
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}

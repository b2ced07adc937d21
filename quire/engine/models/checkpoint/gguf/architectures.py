"""Configs of Hugging Face's kind from the metadata of GGUF files, one function for each architecture.

What a file leaves out, since llama.cpp has it in code, is said here: patterns of sliding windows, scales, activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.relatives import RELATIVES, Relative
from quire.engine.models.checkpoint.gguf.rope import THETA, check_whole_heads, partial_rope, rope_of
from quire.engine.models.errors import BrokenFolder, UnknownArchitecture, UnsupportedModel

Config = dict[str, Any]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
EXPERTS, SHARED = "blk.0.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight"
DENSE, LABELS = "cls.weight", "cls.output.weight"  # of heads for labels
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
# Groups of experts, and those that a token selects, by the number of experts: of files that are older than their keys.
_DEEPSEEK_V2_GROUPS, _DEEPSEEK_V3_GROUPS = {160: (8, 3)}, {256: (8, 4)}
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are scaled by the width of all heads
_STARCODER2_WINDOW = 4096  # of all models that were published; files do not have it
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4


def config_of(facts: GgufFacts) -> Config:
    """The config of a file's model.

    Raises:
        UnknownArchitecture: the architecture is not supported.
        UnsupportedModel: a variant of it is not.
        BrokenFolder: a value is missing, or of a wrong kind.
    """
    name = facts.architecture
    if name not in CONFIGS:
        raise UnknownArchitecture(
            f"{facts.file} is a GGUF file of the architecture {name!r}, which is not supported; supported are "
            f"{', '.join(sorted(CONFIGS))}"
        )
    config = CONFIGS[name](facts)
    return {**config, **_head_for_labels(facts)} if _has_labels(facts) else config


def pooling_of(facts: GgufFacts) -> str | None:
    """How the model pools, as sentence-transformers names it; None: it generates, or has a head for labels."""
    return None if _has_labels(facts) else _POOLING.get(facts.optional_integer(".pooling_type") or 0)


def _has_labels(facts: GgufFacts) -> bool:
    is_cls = any(name.startswith("cls.") for name in facts.shapes)
    return is_cls or facts.optional_integer(".pooling_type") == _RANK


def _head_for_labels(facts: GgufFacts) -> Config:
    """What the configs of rerankers and classifiers have besides.

    Raises:
        UnsupportedModel: the head is not supported.
    """
    labels = list(facts.texts(".classifier.output_labels"))
    if facts.architecture == "qwen3":
        if labels not in ([], ["yes", "no"]) or facts.shape(LABELS)[0] != 2:
            raise UnsupportedModel(
                f"{facts.file} is a GGUF file of a Qwen 3 with the labels {', '.join(labels)}, which is not supported; "
                'supported are those of rerankers, "yes" and "no"'
            )
        return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    if facts.architecture != "bert":
        raise UnsupportedModel(
            f"{facts.file} is a GGUF file of a reranker or classifier of the architecture {facts.architecture!r}, "
            "which is not supported; supported are bert and qwen3"
        )
    if missing := [name for name in (DENSE, LABELS) if name not in facts.shapes]:
        raise UnsupportedModel(
            f"{facts.file} is a GGUF file of a reranker or classifier without {missing[0]}, a part of its head; its "
            "scores would not be those of the model"
        )
    count = facts.shape(LABELS)[0]
    if labels and len(labels) != count:
        raise BrokenFolder(f"{facts.file}: bert.classifier.output_labels has {len(labels)} labels for {count} outputs")
    named = labels or [f"LABEL_{index}" for index in range(count)]
    return {
        "architectures": [f"{'XLMRoberta' if is_roberta(facts) else 'Bert'}ForSequenceClassification"],
        "id2label": {str(index): label for index, label in enumerate(named)},
    }


def num_layers(facts: GgufFacts) -> int:
    """Layers, without those that predict further tokens."""
    return facts.integer(".block_count") - (facts.optional_integer(".nextn_predict_layers") or 0)


def _decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
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
        **_special_tokens(facts),
        **fields,
    }


def _rms_decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    eps = facts.number(".attention.layer_norm_rms_epsilon")
    return _decoder(facts, model_type, head, rms_norm_eps=eps, **fields)


def _special_tokens(facts: GgufFacts) -> Config:
    """Ids of special tokens, which replace those of transformers' defaults."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: facts.optional_integer(f"tokenizer.ggml.{stored}_token_id") for name, stored in names.items()}


def _alternating(layers: int, period: int) -> list[str]:
    """Types of layers, of which every `period`-th attends to all positions."""
    return [_SLIDING if (index + 1) % period else _FULL for index in range(layers)]


def _llama(facts: GgufFacts) -> Config:
    """Llama, Mistral and Mixtral, which share an architecture. Windows of Mistral's first model are not in files."""
    check_whole_heads(facts)
    dim = facts.head_dim
    experts = facts.optional_integer(".expert_count") or 0
    if experts:
        return _rms_decoder(
            facts,
            "mixtral",
            "Mixtral",
            head_dim=dim,
            num_local_experts=experts,
            num_experts_per_tok=facts.integer(".expert_used_count"),
            sliding_window=None,
        )
    return _rms_decoder(facts, "llama", "Llama", head_dim=dim, **_biases(facts))


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
    return _rms_decoder(facts, "ministral3", "Ministral3", head_dim=facts.head_dim, rope_parameters=rope)


def _biases(facts: GgufFacts) -> Config:
    return {
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in facts.shapes,
    }


def _qwen2(facts: GgufFacts) -> Config:
    return _rms_decoder(facts, "qwen2", "Qwen2", use_sliding_window=False, head_dim=facts.head_dim)


def _qwen3(facts: GgufFacts) -> Config:
    bias = "blk.0.attn_q.bias" in facts.shapes
    return _rms_decoder(facts, "qwen3", "Qwen3", use_sliding_window=False, head_dim=facts.head_dim, attention_bias=bias)


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
    return _rms_decoder(
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


def _lfm2(facts: GgufFacts) -> Config:
    """LFM2, dense. Layers without heads of keys are convolutions."""
    key = ".attention.head_count_kv"
    heads, layers = facts.sequence(key), num_layers(facts)
    if len(heads) != layers or not all(type(count) is int and count >= 0 for count in heads):
        raise BrokenFolder(f"{facts.file}: {facts.architecture}{key} must have a number for each of {layers} layers")
    counts = {count for count in heads if count}
    if len(counts) > 1:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}{key} has different numbers of heads, which is not supported"
        )
    uniform = replace(facts, metadata={**facts.metadata, facts.architecture + key: max(counts, default=1)})
    return _decoder(
        uniform,
        "lfm2",
        "Lfm2",
        norm_eps=facts.number(".attention.layer_norm_rms_epsilon"),
        conv_L_cache=facts.integer(".shortconv.l_cache"),
        conv_bias=any(name.endswith(".shortconv.conv.bias") for name in facts.shapes),
        layer_types=[_FULL if count else "conv" for count in heads],
        block_auto_adjust_ff_dim=False,  # files have the size that this makes
    )


def _gemma(facts: GgufFacts) -> Config:
    return _rms_decoder(facts, "gemma", "Gemma", head_dim=facts.head_dim, hidden_act="gelu_pytorch_tanh")


def _gemma2(facts: GgufFacts) -> Config:
    layers = num_layers(facts)
    return _rms_decoder(
        facts,
        "gemma2",
        "Gemma2",
        head_dim=facts.head_dim,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=_gemma_scalar(facts),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=_alternating(layers, 2),
        attn_logit_softcapping=facts.optional_number(".attn_logit_softcapping"),
        final_logit_softcapping=facts.optional_number(".final_logit_softcapping"),
    )


def _gemma3(facts: GgufFacts) -> Config:
    local = facts.optional_number(".rope.freq_base_swa") or THETA
    return _rms_decoder(
        facts,
        "gemma3_text",
        "Gemma3",
        head_dim=facts.head_dim,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=_gemma_scalar(facts),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=_layer_types(facts, 6),
        final_logit_softcapping=facts.optional_number(".final_logit_softcapping"),
        rope_parameters={_SLIDING: {"rope_type": "default", "rope_theta": local}, _FULL: rope_of(facts)},
    )


def _gemma_scalar(facts: GgufFacts) -> int:
    """The number whose root scores are divided by. It is not in files."""
    if num_layers(facts) == _GEMMA_27B[facts.architecture]:
        return facts.integer(".embedding_length") // facts.integer(".attention.head_count")
    return facts.head_dim


def _layer_types(facts: GgufFacts, period: int) -> list[str]:
    """Types of layers: as the file says, or every `period`-th attends to all positions."""
    layers, key = num_layers(facts), ".attention.sliding_window_pattern"
    stored = facts.metadata.get(facts.architecture + key)
    if stored is None or type(stored) is int:
        return _alternating(layers, stored or period)
    flags = facts.sequence(key)
    if len(flags) != layers:
        raise BrokenFolder(f"{facts.file}: {facts.architecture}{key} has {len(flags)} values for {layers} layers")
    return [_SLIDING if flag else _FULL for flag in flags]


def _phi3(facts: GgufFacts) -> Config:
    rope = rope_of(facts)
    trained = rope.get("original_max_position_embeddings", facts.integer(".context_length"))
    return _rms_decoder(
        facts,
        "phi3",
        "Phi3",
        sliding_window=facts.optional_integer(".attention.sliding_window") or None,
        original_max_position_embeddings=trained,
        rope_parameters=partial_rope(facts, rope),
    )


def _phi2(facts: GgufFacts) -> Config:
    return _decoder(
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
    return _rms_decoder(
        facts,
        "smollm3",
        "SmolLM3",
        no_rope_layers=[int((index + 1) % 4 != 0) for index in range(layers)],
        layer_types=[_FULL] * layers,
        use_sliding_window=False,
        sliding_window=None,
        **_biases(facts),
    )


def _granite(facts: GgufFacts) -> Config:
    if facts.optional_integer(".expert_count"):
        raise UnsupportedModel(
            f"{facts.file} is a Granite model with experts, which is supported with the architecture granitemoe only"
        )
    return _granite_decoder(facts, "granite", "Granite", **_biases(facts))


def _granitemoe(facts: GgufFacts) -> Config:
    if facts.optional_integer(".expert_shared_feed_forward_length"):
        raise UnsupportedModel(f"{facts.file} is a Granite model with shared experts, which is not supported")
    return _granite_decoder(
        facts,
        "granitemoe",
        "GraniteMoe",
        num_local_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        attention_bias=_biases(facts)["attention_bias"],
    )


def _granite_decoder(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    check_whole_heads(facts)
    scale = facts.optional_number(".attention.scale")
    return _rms_decoder(
        facts,
        model_type,
        head,
        attention_multiplier=facts.head_dim**-0.5 if scale is None else scale,
        embedding_multiplier=facts.optional_number(".embedding_scale") or 1.0,
        residual_multiplier=facts.optional_number(".residual_scale") or 1.0,
        logits_scaling=facts.optional_number(".logit_scale") or 1.0,
        **fields,
    )


def _olmo2(facts: GgufFacts) -> Config:
    """OLMo 2, and OLMo 3, of which layers with sliding windows have a rope without a scaling."""
    window = facts.optional_integer(".attention.sliding_window")
    if not window:
        return _rms_decoder(facts, "olmo2", "Olmo2", attention_bias=False)
    rope = rope_of(facts)
    local = facts.optional_number(".rope.freq_base_swa") or rope["rope_theta"]
    return _rms_decoder(
        facts,
        "olmo3",
        "Olmo3",
        attention_bias=False,
        sliding_window=window,
        layer_types=_layer_types(facts, 4),
        rope_parameters={_SLIDING: {"rope_type": "default", "rope_theta": local}, _FULL: rope},
    )


def _exaone4(facts: GgufFacts) -> Config:
    check_whole_heads(facts)
    window = facts.optional_integer(".attention.sliding_window") or None
    types = [_FULL] * num_layers(facts) if window is None else _layer_types(facts, 4)
    return _rms_decoder(facts, "exaone4", "Exaone4", head_dim=facts.head_dim, sliding_window=window, layer_types=types)


def _relative(make: Callable[[GgufFacts], Relative], facts: GgufFacts) -> Config:
    relative = make(facts)
    return _rms_decoder(facts, relative.model_type, relative.head, head_dim=facts.head_dim, **relative.fields)


def _falcon(facts: GgufFacts) -> Config:
    """Falcon: models with several key heads have the new architecture."""
    kv_heads = facts.optional_integer(".attention.head_count_kv") or 1
    two_norms = "blk.0.attn_norm_2.weight" in facts.shapes
    hidden = facts.integer(".embedding_length")
    config = _decoder(
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
    return _decoder(
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
    return _decoder(
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
    return _decoder(
        facts,
        "cohere",
        "Cohere",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        logit_scale=facts.number(".logit_scale"),
        use_qk_norm="blk.0.attn_q_norm.weight" in facts.shapes,
        attention_bias="blk.0.attn_q.bias" in facts.shapes,
    )


def _cohere2(facts: GgufFacts) -> Config:
    return _decoder(
        facts,
        "cohere2",
        "Cohere2",
        layer_norm_eps=facts.number(".attention.layer_norm_epsilon"),
        logit_scale=facts.number(".logit_scale"),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=_layer_types(facts, 4),
        attention_bias="blk.0.attn_q.bias" in facts.shapes,
    )


def _deepseek2(facts: GgufFacts) -> Config:
    """DeepSeek V2, V3 and R1, whose routers differ."""
    function, is_normed = facts.optional_integer(".expert_gating_func"), bool(facts.flag(".expert_weights_norm"))
    if function not in (None, _SOFTMAX, _SIGMOID):
        raise UnsupportedModel(
            f"{facts.file}: deepseek2.expert_gating_func is {function}, which is not supported; supported are "
            f"{_SOFTMAX} (softmax) and {_SIGMOID} (sigmoid)"
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
    return _rms_decoder(
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


def _gpt_oss(facts: GgufFacts) -> Config:
    rope = rope_of(facts)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return _rms_decoder(
        facts,
        "gpt_oss",
        "GptOss",
        head_dim=facts.head_dim,
        intermediate_size=facts.integer(".expert_feed_forward_length"),
        num_local_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        sliding_window=facts.integer(".attention.sliding_window"),
        layer_types=_layer_types(facts, 2),
        attention_bias=True,
        rope_parameters=rope,
    )


def _bert(facts: GgufFacts) -> Config:
    """BERT, and RoBERTa and its relatives, whose rows of positions before the first token are not in files."""
    positions = facts.shape("position_embd.weight")[0]
    pad = facts.optional_integer("tokenizer.ggml.padding_token_id")
    head = "XLMRoberta" if is_roberta(facts) else "Bert"
    return {
        **_encoder(facts, "xlm-roberta" if is_roberta(facts) else "bert", head),
        "max_position_embeddings": positions + roberta_offset(facts),
        "hidden_act": "gelu",
        "pad_token_id": (1 if is_roberta(facts) else 0) if pad is None else pad,
    }


def is_roberta(facts: GgufFacts) -> bool:
    """Whether a file of the architecture `bert` has RoBERTa or one of its relatives."""
    return facts.optional_text("tokenizer.ggml.model") != "bert"


def roberta_offset(facts: GgufFacts) -> int:
    """How many rows of positions a file lacks, those up to the padding token's."""
    if facts.architecture != "bert" or not is_roberta(facts):
        return 0
    pad = facts.optional_integer("tokenizer.ggml.padding_token_id")
    return (1 if pad is None else pad) + 1


def _jina_bert(facts: GgufFacts) -> Config:
    """Jina's embedders v2. One variant normalizes queries and keys, which configs say by the repository of its code."""
    variant = "qk-post-norm" if "blk.0.attn_q_norm.weight" in facts.shapes else "implementation"
    prefix = "jinaai/jina-bert-v2-" if variant == "qk-post-norm" else "jinaai/jina-bert-"
    return {
        **_encoder(facts, "bert", "Bert"),
        "max_position_embeddings": facts.integer(".context_length"),
        "hidden_act": "gelu",
        "pad_token_id": facts.optional_integer("tokenizer.ggml.padding_token_id") or 0,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "auto_map": {"AutoConfig": f"{prefix}{variant}--configuration_bert.JinaBertConfig"},
    }


def _nomic_bert(facts: GgufFacts) -> Config:
    return {
        **_encoder(facts, "nomic_bert", "NomicBert"),
        "max_position_embeddings": facts.integer(".context_length"),
        "hidden_act": "silu",
        "pad_token_id": facts.optional_integer("tokenizer.ggml.padding_token_id") or 0,
        "rope_parameters": rope_of(facts),
    }


def _encoder(facts: GgufFacts, model_type: str, head: str) -> Config:
    types = facts.shapes.get("token_types.weight", (0,))[0]
    return {
        "architectures": [f"{head}Model"],
        "model_type": model_type,
        "hidden_size": facts.integer(".embedding_length"),
        "intermediate_size": facts.integer(".feed_forward_length"),
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": facts.integer(".attention.head_count"),
        "layer_norm_eps": facts.number(".attention.layer_norm_epsilon"),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "type_vocab_size": types,
        **_special_tokens(facts),
    }


CONFIGS: dict[str, Callable[[GgufFacts], Config]] = {
    **{name: partial(_relative, make) for name, make in RELATIVES.items()},
    "bert": _bert,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "deepseek2": _deepseek2,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "jina-bert-v2": _jina_bert,
    "lfm2": _lfm2,
    "llama": _llama,
    "mistral3": _mistral3,
    "nomic-bert": _nomic_bert,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen2vl": _qwen2,  # without pictures, and with them: see `projector`
    "qwen3moe": _qwen3moe,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}

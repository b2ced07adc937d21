"""Small transformers models with random weights: reference implementation and source of model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tokenizer import EOS, VOCAB_SIZE

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_QWEN_MOE = {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_QWEN2_MOE = {
    **{name: value for name, value in _QWEN_MOE.items() if name not in ("head_dim", "norm_topk_prob")},
    "shared_expert_intermediate_size": 80,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
}
_KIMI = {
    **{name: value for name, value in _MLA.items() if name not in ("n_routed_experts", "first_k_dense_replace")},
    "q_lora_rank": None,
    "num_local_experts": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 48,
}

# Case -> (model type, overrides of BASE).
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 48, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "ministral": ("ministral", {"head_dim": 32, "sliding_window": 24, "layer_types": _EVERY_OTHER}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "phi3-partial-rope": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 24}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", _GRANITE),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2_moe": ("qwen2_moe", _QWEN2_MOE),
    "qwen3_moe": ("qwen3_moe", _QWEN_MOE),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **{name: value for name, value in _MLA.items() if name != "norm_topk_prob"},
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "deepseek_v3-wide": ("deepseek_v3", {**_MLA, "kv_lora_rank": 32, "qk_rope_head_dim": 32}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**_MLA, "q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}),
    "bloom-heads": ("bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 96, "seq_length": 256}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
    ),
    "gptj": ("gptj", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("phi", {}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-heads": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 24}),
}

_HEADS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
# Models with convolutions and state spaces.
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "conv_bias": True}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["full_attention", "conv"],
            "moe_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **_HEADS,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 4,
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **_HEADS,
            "layer_types": ["full_attention", "linear_attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
    ),
    "bamba": ("bamba", {**_HEADS, "attn_layer_indices": [1]}),
    "jamba": ("jamba", {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "mamba": ("mamba", {"use_bias": True}),
    "falcon_mamba": ("falcon_mamba", {}),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_HEADS,
            "mamba_d_ssm": 128,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9],
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 1.1,
            "lm_head_multiplier": 0.4,
            "embedding_multiplier": 2.0,
        },
    ),
    "falcon_h1-norm": ("falcon_h1", {**_HEADS, "mamba_d_ssm": 128, "mamba_rms_norm": True}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "time_step_min": 1e-30,  # transformers limits the steps of prompts by it, but not those of other tokens
        },
    ),
}

# Layers with the gated delta rule.
DELTA_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_QWEN2_MOE, **_DELTA_NET, "head_dim": 32}),
    "qwen3_5": ("qwen3_5_text", {**_DELTA_NET, "head_dim": 32, "linear_value_head_dim": 16}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **{name: value for name, value in _QWEN2_MOE.items() if name != "mlp_only_layers"},
            **_DELTA_NET,
            "head_dim": 32,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA_NET, "linear_num_key_heads": 4, "rope_parameters": None}),
    "kimi_linear": ("kimi_linear", _KIMI),
}

_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
# Relatives of Llama whose attention, norms or experts differ; two layers each.
LLAMA_RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "deepseek_v32": (
        "deepseek_v32",
        {**_MLA, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 24, "num_hidden_layers": 2},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **{name: value for name, value in _MLA.items() if name != "first_k_dense_replace"},
            "index_n_heads": 16,  # so many that hardly any score is 0, and torch chooses among equal ones
            "index_head_dim": 32,
            "index_topk": 24,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "dots1": ("dots1", {**_GROUPED_EXPERTS, **_LAYERS}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 16}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
    ),
    "cwm": ("cwm", {**_LAYERS, "head_dim": 16, "rope_parameters": _LLAMA3, "bos_token_id": 0}),
    "exaone4": ("exaone4", _LAYERS),
    "exaone_moe": (
        "exaone_moe",
        {
            **{name: value for name, value in _GROUPED_EXPERTS.items() if name not in ("n_routed_experts",)},
            **_LAYERS,
            "num_experts": 8,
            "num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in _MLA.items() if name != "first_k_dense_replace"},
            "num_hidden_layers": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "solar_open": (
        "solar_open",
        {
            **{name: value for name, value in _GROUPED_EXPERTS.items() if name != "first_k_dense_replace"},
            "head_dim": 16,
        },
    ),
    "exaone4-rope": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm": ("glm", {"head_dim": 16, "rope_parameters": _PARTIAL}),
    "glm4": ("glm4", {"head_dim": 32, "rope_parameters": _PARTIAL}),
    "glm4_moe": ("glm4_moe", {**_GROUPED_EXPERTS, "use_qk_norm": True, "rope_parameters": _PARTIAL}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 1]}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 1, 0],
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "attn_scale": 0.3,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": _PARTIAL},
    ),
    "olmo3": (
        "olmo3",
        {
            **_LAYERS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": _YARN,
            },
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
}
_LAYER_INPUTS = {
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 30.0,
}
# Models with linear recurrences, and with blocks that layers have in common.
RECURRENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": (
        "recurrent_gemma",
        {"block_types": ["recurrent", "attention"], "attention_window_size": 24, "num_hidden_layers": 3},
    ),
    "minimax": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            "block_size": 16,
            "num_local_experts": 4,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.8,
            "full_attn_alpha_factor": 1.2,
            "mlp_beta_factor": 0.7,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 5,
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "adapter_rank": 8,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "time_step_min": 1e-30,  # transformers limits the steps of prompts by it, but not those of other tokens
        },
    ),
    "zamba2-plain": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "adapter_rank": 8,
            "num_key_value_heads": 4,
            "time_step_min": 1e-30,
        },
    ),
}
# Layers with inputs of their own, and with keys of earlier layers.
LAYER_INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", {**_LAYER_INPUTS, "global_head_dim": 64, "use_double_wide_mlp": True}),
    "gemma4-moe": (
        "gemma4_text",
        {
            **_LAYER_INPUTS,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 24,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **_LAYER_INPUTS,
            "vocab_size_per_layer_input": VOCAB_SIZE - 20,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
        },
    ),
}

# Models that run as transformers' own implementation, with its attention replaced.
FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "diffllama": ("diffllama", {}),  # calls attention twice in each layer
    "longcat_flash": (  # calls attention twice in each layer, and has experts that compute nothing
        "longcat_flash",
        {
            **_MLA,
            "num_hidden_layers": 2,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 48,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "phimoe": ("phimoe", {"num_local_experts": 4, "sliding_window": 24}),  # its window is in its masks only
    # These take a view of the attention's result.
    "afmoe": (
        "afmoe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "head_dim": 16,
            "num_dense_layers": 1,
            "sliding_window": 24,
        },
    ),
    "jetmoe": ("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make_model(case: str, *, seed: int = 0, **changes: Any) -> Any:
    """Build a transformers model of a case in float32, with weights large enough for distinct logits."""
    tables = (DECODERS, FALLBACKS, STATE_SPACES, DELTA_NETS, LLAMA_RELATIVES, LAYER_INPUTS, RECURRENCES)
    model_type, overrides = next(table[case] for table in tables if case in table)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**BASE, **overrides, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, model_type)
    model.generation_config.eos_token_id = None
    return model


def draw_weights(model: Any, model_type: str) -> None:
    """Replace a model's weights by random ones, which are large enough for distinct logits."""
    std = 0.1 if model_type == "zamba2" else 0.3  # with larger ones its layers, behind one another, amplify errors
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name.lower() or ".ln_" in name
        torch.nn.init.normal_(parameter, std=0.1 if is_norm else std)
        if is_norm and name.endswith("weight") and not model_type.startswith(("gemma", "recurrent_gemma")):
            parameter.data += 1
    for name, buffer in model.named_buffers():
        if "correction" in name:
            torch.nn.init.normal_(buffer, std=0.1)


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model to a folder, without a tokenizer."""
    model.save_pretrained(folder, **options)
    return folder

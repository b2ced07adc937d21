"""GGUF files of tiny models, written with the package `gguf` as llama.cpp writes them.

A model's folder becomes the dequantized twin of its file: its matrices are rounded to what the file has.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support import gguf_hybrids
from tests.support.tokenizer import ALPHABET, CHAT_TEMPLATE, SPECIAL

Array = NDArray[Any]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
ARCHITECTURES = {
    "apertus": "apertus",
    "arcee": "arcee",
    **gguf_hybrids.ARCHITECTURES,
    "bert": "bert",
    "bloom": "bloom",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "eurobert": "eurobert",
    "jina_embeddings_v3": "jina-bert-v3",
    "modernbert": "modern-bert",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone-moe",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4v_text": "glm4",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "mistral": "llama",
    "mixtral": "llama",
    "nomic_bert": "nomic-bert",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "paddleocr_vl_text": "paddleocr",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_vl_text": "qwen3vl",
    "ministral3": "mistral3",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "xlm-roberta": "bert",
}
JINA = "jina-bert-v2"  # has the type of another architecture
TOKENS = [*ALPHABET, *SPECIAL, "he", "th"]
KINDS = [*(1 for _ in ALPHABET), *(3 for _ in SPECIAL), 1, 1]
# Architectures with the same names, which the package has.
_KNOWN_AS = {"deepseek32": "glm-dsa", "minimax-01": "minimax-m2"}
_EXPERT = re.compile(r"(?P<before>.*experts)\.(?P<index>\d+)\.(?P<after>.*)")
_ALTUP = re.compile(r"(?P<before>.*altup_(?:unembed_)?projections)\.(?P<index>\d+)\.weight")
_LEARNED = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}  # of Gemma 4
_LATENT = re.compile(r"(?P<before>.*self_attn)\.kv_b_proj\.weight")
_PAIRS = (
    "arcee",
    "granite",
    "granitemoe",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "smollm3",
    *gguf_hybrids.PAIRED,
)  # model types whose rope rotates neighbours in files
_NEVER_QUANTIZED = (
    "norm",
    "position_embeddings",
    "token_type",
    ".gate.weight",
    "shared_expert_gate",
    "router",
    "sinks",
    "scale",
    "scalar",
    "altup",
    "kv_b_proj",
    "classifier",
    "head.dense",
    "pooler",
    "conv1d",
    "A_log",
    "x_proj",
    "dt_proj",
)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType | None = Q8_0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str | None = None,
    **options: Any,
) -> Path:
    """Write the model in a folder to a file, and round its weights in the folder to those of the file.

    Args:
        folder: of a tiny model.
        path: of the file.
        kind: of the blocks of matrices; None: they stay float32.
        metadata: values to add or replace; keys without a dot at the beginning are whole.
        tensors: further ones, by the names that they have in files.
        tokenizer: writes the tokenizer; None: one of bytes.
        architecture: the name that the file has for it; None: that of the model's type.
        options: of `GGUFWriter`.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    blocks: dict[str, Array] = {}
    for name, weight in weights.items():
        if kind is not None and _is_quantized(name, weight, kind):
            blocks[name] = gguf.quantize(weight, kind)
            weights[name] = gguf.dequantize(blocks[name], kind)
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    is_jina = config.get("position_embedding_type") == "alibi"
    architecture = architecture or (JINA if is_jina else ARCHITECTURES[config["model_type"]])
    writer = gguf.GGUFWriter(path, architecture, **options)
    values = {**_metadata(config, weights), **(metadata or {})}
    for key, value in values.items():
        if value is not None:
            add_value(writer, architecture + key if key.startswith(".") else key, value)
    (tokenizer or _write_tokenizer)(writer)
    names = _names(architecture, config)
    for name, array in _converted(config, {**weights, **blocks}).items():
        writer.add_tensor(names(name), np.ascontiguousarray(array), raw_dtype=kind if array.dtype == np.uint8 else None)
    for name, array in {**_rope_tensors(config), **(tensors or {})}.items():
        writer.add_tensor(name, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_quantized(name: str, weight: Array, kind: gguf.GGMLQuantizationType) -> bool:
    if any(part in name for part in _NEVER_QUANTIZED) or "gate_up_proj" in name or "experts.down_proj" in name:
        return False  # the last two are gpt-oss's, whose inputs lie before the outputs
    return weight.ndim > 1 and weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of the metadata, of the kind that it has."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        add = writer.add_int32 if value < 0 else writer.add_uint32 if value < 1 << 32 else writer.add_uint64
        add(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["h e", "t h"])
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _names(architecture: str, config: dict[str, Any]) -> Callable[[str], str]:
    """The names of tensors in files by those in checkpoints, as the package has them."""
    known = _KNOWN_AS.get(architecture, architecture)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    layers = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    mapped = gguf.get_tensor_name_map(arch, layers)

    def name_of(name: str) -> str:
        if learned := next((_LEARNED[end] for end in _LEARNED if name.endswith(end)), None):
            return f"blk.{name.split('.layers.')[1].partition('.')[0]}.{learned}"
        if name.startswith("blk."):
            return name
        name = name.removeprefix({"bloom": "transformer.", "modern-bert": "model."}.get(architecture, ""))
        found = mapped.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found if found.endswith((".weight", ".bias", "ssm_a", "ssm_d")) else f"{found}.weight"

    return name_of


def _converted(config: dict[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of a file, by the names of modules in checkpoints."""
    kind, heads = config["model_type"], config.get("num_attention_heads") or 0
    kv_heads = config.get("num_key_value_heads") or heads
    weights = gguf_hybrids.changed(config, weights)
    stacks: dict[str, dict[int, Array]] = {}
    arrays: dict[str, Array] = {}
    for name, weight in weights.items():
        if (
            "rotary_emb" in name
            or "pooler" in name
            or "classifier" in name
            or "position_ids" in name
            or name.startswith("head.")
        ):
            continue
        if (match := _EXPERT.fullmatch(name)) is not None:
            stacks.setdefault(f"{match['before']}.{match['after']}", {})[int(match["index"])] = weight
        elif (match := _ALTUP.fullmatch(name)) is not None:
            stacks.setdefault(f"{match['before']}.weight", {})[int(match["index"])] = weight
        elif kind == "gpt_oss" and ".experts." in name:
            arrays |= _gpt_oss_experts(name, weight)
        elif kind == "gemma4_text" and ".experts." in name:
            arrays[f"{name}.weight"] = weight
        elif ".experts." in name:  # Llama 4's inputs lie before the outputs
            arrays |= _stacked_experts(name, weight.swapaxes(1, 2) if kind == "llama4_text" else weight)
        elif name.endswith((".input_linear.weight", ".output_linear.weight")):
            arrays |= _granite_experts(name, weight)
        elif (match := _LATENT.fullmatch(name)) is not None:
            arrays |= _latents(match["before"], weight, config)
        elif kind in _PAIRS and (".q_proj." in name or ".k_proj." in name):
            arrays[name] = in_pairs(weight, heads if ".q_proj." in name else kv_heads)
        elif kind == "glm4v_text" and (".q_proj." in name or ".k_proj." in name):
            arrays[name] = _halves_of_part(weight, config)
        elif name.endswith(".conv.conv.weight"):
            arrays[name] = weight[:, 0]
        elif "shared_expert_gate" in name:
            arrays[name] = weight[0]
        elif "act_fn" in name:
            continue  # lies in the metadata
        elif kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
            arrays[name] = weight.T
        elif kind in ("bloom", "falcon", "gpt_neox") and "query_key_value" in name:
            arrays[name] = _parts(weight, config)
        elif kind in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm.weight"):
            arrays[name] = weight + np.float32(1)
        elif kind == "xlm-roberta" and "position_embeddings" in name:
            arrays[name] = weight[config["pad_token_id"] + 1 :]
        else:
            arrays[name.replace("e_score_correction_bias", "e_score_correction.bias")] = weight
    arrays |= {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}
    return arrays


def in_pairs(weight: Array, heads: int) -> Array:
    """Both halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _halves_of_part(weight: Array, config: dict[str, Any]) -> Array:
    """The rotated part of each head with the neighbours in two halves."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(dim * config["rope_parameters"]["partial_rotary_factor"])
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, dim)]
    heads = weight.reshape(-1, dim, *weight.shape[1:])
    turned: Array = heads[:, order].reshape(weight.shape)
    return turned


def _parts(weight: Array, config: dict[str, Any]) -> Array:
    """A projection with all queries before all keys before all values."""
    heads = config.get("num_attention_heads") or config["n_head"]
    groups = heads
    if config["model_type"] == "falcon":
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    by_group = weight.reshape(groups, heads // groups + 2, config["hidden_size"] // heads, *weight.shape[1:])
    parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


def _latents(before: str, weight: Array, config: dict[str, Any]) -> dict[str, Array]:
    """DeepSeek's up-projections of keys, which are transposed, and of values."""
    heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    by_head = weight.reshape(heads, -1, weight.shape[-1])
    return {
        f"{before}.k_b_proj.weight": by_head[:, :keys].swapaxes(1, 2),
        f"{before}.v_b_proj.weight": by_head[:, keys:],
    }


def _gpt_oss_experts(name: str, weight: Array) -> dict[str, Array]:
    """Gates and ups, which alternate in the checkpoint, and everything with outputs before inputs."""
    before, _, last = name.rpartition(".")
    suffix = "bias" if last.endswith("_bias") else "weight"
    parts = (
        {"gate_proj": weight[..., ::2], "up_proj": weight[..., 1::2]} if "gate_up" in last else {"down_proj": weight}
    )
    return {
        f"{before}.{part}.{suffix}": array if suffix == "bias" else array.swapaxes(1, 2)
        for part, array in parts.items()
    }


def _stacked_experts(name: str, weight: Array) -> dict[str, Array]:
    """Experts that are stacked in the checkpoint."""
    before, _, last = name.rpartition(".")
    if last != "gate_up_proj":
        return {f"{before}.{last}.weight": weight}
    gate, up = np.split(weight, 2, axis=1)
    return {f"{before}.gate_proj.weight": gate, f"{before}.up_proj.weight": up}


def _granite_experts(name: str, weight: Array) -> dict[str, Array]:
    """Those of a layer, under names of which there is one for each array."""
    layer = name.partition(".block_sparse_moe.")[0]
    last = "gate_up_proj" if ".input_linear." in name else "down_proj"
    return _stacked_experts(f"{layer}.mlp.experts.{last}", weight)


def _rope_tensors(config: dict[str, Any]) -> dict[str, Any]:
    """Factors by which frequencies are divided."""
    rope = config.get("rope_parameters") or {}
    if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
        layer = next(iter(config["per_layer_config"].values()))
        rotated = int(layer["head_dim"] * full["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": [1.0] * rotated + [1e30] * (layer["head_dim"] // 2 - rotated)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{side}.weight": rope[f"{side}_factor"] for side in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    lengths = [2 * math.pi * rope["rope_theta"] ** (2 * i / dim) for i in range(dim // 2)]
    low, high = (rope["original_max_position_embeddings"] / rope[f"{side}_freq_factor"] for side in ("low", "high"))
    factors = []
    for length in lengths:
        smooth = min(
            1.0,
            max(
                0.0,
                (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"])
                / (rope["high_freq_factor"] - rope["low_freq_factor"]),
            ),
        )
        factors.append(
            1.0 if length < high else rope["factor"] if length > low else 1 / ((1 - smooth) / rope["factor"] + smooth)
        )
    return {"rope_freqs.weight": factors}


def _metadata(config: dict[str, Any], weights: Mapping[str, Array]) -> dict[str, Any]:
    """What llama.cpp's scripts write of a config. Keys with a dot at the beginning follow the architecture's name."""
    config = {**config, **{name: config[early] for early, name in _EARLY_NAMES.items() if early in config}}
    get, kind = config.get, config["model_type"]
    if kind in gguf_hybrids.ARCHITECTURES:
        return gguf_hybrids.metadata(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = get("head_dim") or hidden // heads
    ropes = get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    layer_norm = next(
        (get(name) for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps") if get(name)), None
    )
    kv_heads = (get("num_kv_heads") if get("new_decoder_architecture") else 1) if kind == "falcon" else None
    values = {
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": hidden,
        ".block_count": config["num_hidden_layers"],
        ".feed_forward_length": (get("ffn_hidden_size") or get("intermediate_size") if kind != "gpt2" else None)
        or 4 * hidden,
        ".attention.head_count": heads,
        ".attention.head_count_kv": kv_heads or get("num_key_value_heads") or heads,
        ".attention.key_length": get("head_dim"),
        ".attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        ".attention.layer_norm_epsilon": layer_norm,
        ".attention.sliding_window": get("sliding_window") if kind in _WINDOWED else get("local_attention"),
        ".rope.freq_base": rope.get("rope_theta"),
        ".rope.dimension_count": int(dim * rope.get("partial_rotary_factor", 1.0)),
        ".attn_logit_softcapping": get("attn_logit_softcapping"),
        ".final_logit_softcapping": get("final_logit_softcapping"),
        ".logit_scale": get("logit_scale", get("logits_scaling")),
        ".attention.scale": get("attention_multiplier"),
        ".embedding_scale": get("embedding_multiplier"),
        ".residual_scale": get("residual_multiplier"),
        ".expert_count": get("num_local_experts") or get("num_experts"),
        ".expert_used_count": get("num_experts_per_tok"),
        ".expert_feed_forward_length": get("moe_intermediate_size")
        or (get("intermediate_size") if kind == "gpt_oss" else None),
        ".expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        ".use_parallel_residual": get("use_parallel_residual"),
        **_scaling(rope, config),
        **(_deepseek(config, rope) if "kv_lora_rank" in config else {}),
        **(_relative(config) if kind in LLAMA_RELATIVES else {}),
        **(_modern_bert(config) if kind == "modernbert" else {}),
        **(_xielu(config, weights) if kind == "apertus" else {}),
        **(_indexer(config) if "index_topk" in config else {}),
        **(_layer_inputs(config) if kind in ("gemma3n_text", "gemma4_text") else {}),
    }
    return {
        key: float(value) if key.endswith("_scale") and isinstance(value, int) else value
        for key, value in values.items()
    }


# Names of fields in the configs of early models.
_EARLY_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
}
_WINDOWED = ("cohere2", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "starcoder2")


def _scaling(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    trained: Any = rope.get("original_max_position_embeddings")
    if kind == "longrope":
        scale = config["max_position_embeddings"] / trained
        factor = math.sqrt(1 + math.log(scale) / math.log(trained)) if scale > 1 else 1.0
        return {".rope.scaling.attn_factor": factor, ".rope.scaling.original_context_length": trained}
    if kind not in ("linear", "yarn"):
        return {}
    is_ministral = config["model_type"] == "ministral3"
    return {
        ".rope.scaling.type": kind,
        ".rope.scaling.factor": float(rope["factor"]),
        ".rope.scaling.original_context_length": trained,
        ".rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"] if is_ministral else None,
        ".attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }


def _layer_inputs(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3n and 4."""
    kinds, unshared = config["layer_types"], config["num_hidden_layers"] - config["num_kv_shared_layers"]
    windows = [kind == "sliding_attention" for kind in kinds]
    values = {
        ".attention.sliding_window_pattern": windows,
        ".attention.shared_kv_layers": config["num_kv_shared_layers"],
        ".embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        ".rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config["model_type"] == "gemma3n_text":
        sparsities = config["activation_sparsity_pattern"]
        return {
            **values,
            ".feed_forward_length": config["intermediate_size"],
            ".altup.num_inputs": config["altup_num_inputs"],
            ".altup.active_idx": config["altup_active_idx"],
            ".activation_sparsity_scale": [NormalDist().inv_cdf(part) if part else -math.inf for part in sparsities],
        }
    width, wide = config["intermediate_size"], config["use_double_wide_mlp"]
    layers = {int(layer): fields for layer, fields in config["per_layer_config"].items()}
    full = layers[kinds.index("full_attention")]
    kv_heads = full.get("num_key_value_heads", config["num_key_value_heads"])
    return {
        **values,
        ".feed_forward_length": [width * (2 if wide and index >= unshared else 1) for index in range(len(kinds))],
        ".attention.head_count_kv": [config["num_key_value_heads"] if window else kv_heads for window in windows],
        ".attention.key_length": full["head_dim"],
        ".attention.key_length_swa": config["head_dim"],
        ".expert_used_count": config["top_k_experts"],
    }


def _modern_bert(config: dict[str, Any]) -> dict[str, Any]:
    return {
        ".rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        ".attention.sliding_window_pattern": config["global_attn_every_n_layers"],
        ".hidden_activation": config["hidden_activation"],
    }


def _xielu(config: dict[str, Any], weights: Mapping[str, Array]) -> dict[str, Any]:
    """The numbers of Apertus' activations by layer."""
    layers = range(config["num_hidden_layers"])
    return {
        f"xielu.{name}": [float(weights[f"model.layers.{layer}.mlp.act_fn.{name}"].item()) for layer in layers]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _indexer(config: dict[str, Any]) -> dict[str, Any]:
    """What files of models say that attend to selected tokens."""
    values = {
        ".attention.indexer.head_count": config["index_n_heads"],
        ".attention.indexer.key_length": config["index_head_dim"],
        ".attention.indexer.top_k": config["index_topk"],
        ".leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
    }
    if "indexer_types" not in config:
        return values
    return {**values, ".attention.indexer.types": [kind == "full" for kind in config["indexer_types"]]}


LLAMA_RELATIVES = (
    *(
        "dots1",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "glm4_moe",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama4_text",
    ),
    *("minimax_m2", "olmo3"),
)


def _relative(config: dict[str, Any]) -> dict[str, Any]:
    """What relatives of Llama have besides."""
    get, kind = config.get, config["model_type"]
    rope = get("rope_parameters") or {}
    dim = get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    stretched = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)) if rope.get("alpha") else None
    windows = [type_ == "sliding_attention" for type_ in get("layer_types") or ()]
    dense = config["mlp_layer_types"].index("sparse") if kind == "exaone_moe" else None
    has_plain_size = kind in ("hunyuan_v1_moe", "llama4_text", "minimax_m2")
    values = {
        ".feed_forward_length": get("intermediate_size_mlp"),
        ".rope.freq_base": stretched,
        ".attention.sliding_window": get("sliding_window") if any(windows) else None,
        ".attention.sliding_window_pattern": windows if any(windows) else None,
        ".expert_count": get("n_routed_experts") or get("moe_num_experts") or get("num_experts"),
        ".expert_used_count": get("moe_k") or get("moe_topk"),
        ".expert_shared_count": get("n_shared_experts") or get("moe_num_shared_experts") or get("num_shared_experts"),
        ".expert_feed_forward_length": get("intermediate_size") if has_plain_size else None,
        ".expert_shared_feed_forward_length": get("intermediate_size") if kind == "hunyuan_v1_moe" else None,
        ".leading_dense_block_count": get("first_k_dense_replace", get("moe_layer_start_index")) or dense,
        ".interleave_moe_layer_step": get("interleave_moe_layer_step") or get("moe_layer_interval"),
        ".expert_weights_scale": get("routed_scaling_factor"),
        ".expert_weights_norm": get("norm_topk_prob"),
        ".expert_gating_func": 2 if kind in ("glm4_moe", "minimax_m2") else None,
        ".expert_group_count": get("n_group"),
        ".expert_group_used_count": get("topk_group"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _deepseek(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """With the keys of latent attention, of which a token has the keys of one head in its cache."""
    multiplier = 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None
    return {
        ".attention.head_count_kv": 1,
        ".attention.q_lora_rank": config["q_lora_rank"],
        ".attention.kv_lora_rank": config["kv_lora_rank"],
        ".attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        ".attention.value_length": config["kv_lora_rank"],
        ".attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        ".attention.value_length_mla": config["v_head_dim"],
        ".rope.dimension_count": config["qk_rope_head_dim"],
        ".rope.scaling.yarn_log_multiplier": multiplier,
        ".leading_dense_block_count": config.get("first_k_dense_replace"),
        ".expert_count": config["n_routed_experts"],
        ".expert_shared_count": config["n_shared_experts"],
        ".expert_weights_scale": config["routed_scaling_factor"],
        ".expert_weights_norm": config["norm_topk_prob"],
        ".expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
        ".expert_group_count": config["n_group"],
        ".expert_group_used_count": config["topk_group"],
    }

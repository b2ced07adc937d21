"""Writes checkpoints with random weights and states of a fixed size, in real shapes, in the files of Hugging Face.

    python -m benchmarks.hybrid_models FOLDER --tokenizer SMOLLM2 --shapes qwen3.5-0.8b
    python -m benchmarks.hybrid_models FOLDER --configs

`qwen3.5-0.8b` has the shape of Qwen3.5-0.8B's language model (the gated delta rule), `lfm2-350m` that of LFM2-350M
(short convolutions) and `granite-4-h-350m` that of Granite 4.0 H 350M (Mamba-2). `qwen3.5-moe-0.9b` and `gemma4-0.8b`
are no published sizes: a mixture of experts with the gated delta rule, and inputs of layers. With --configs the folders
have a config alone, for `benchmarks.cpu.steps --load-format dummy`. SMOLLM2 is a folder with SmolLM2's
tokenizer.json. Greedy decoding never chooses a special token, so that answers are as long as asked for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gguf_models import CHAT
from benchmarks.picture_models import END, write_json, write_tokenizer

_QWEN3_5_LAYERS, _GRANITE_LAYERS, _LFM2_LAYERS = 24, 32, 16
_GRANITE_ATTENTION, _LFM2_ATTENTION = (10, 13, 17, 27), (2, 5, 8, 10, 12, 14)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": _QWEN3_5_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": _LFM2_LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if index in _LFM2_ATTENTION else "conv" for index in range(_LFM2_LAYERS)],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "max_position_embeddings": 128_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "granite-4-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": _GRANITE_LAYERS,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention" if index in _GRANITE_ATTENTION else "mamba" for index in range(_GRANITE_LAYERS)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.246,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131_072,
    },
    "qwen3.5-moe-0.9b": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 8192,
    },
    "gemma4-0.8b": {
        "model_type": "gemma4_text",
        "vocab_size": 65_536,
        "vocab_size_per_layer_input": 65_536,
        "hidden_size": 1024,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 4096,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 10,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4,
        "max_position_embeddings": 8192,
    },
}


def make_config(name: str, folder: Path) -> None:
    """Write the config of a shape alone, whose tokens end no answer."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in SHAPES[name].items() if key != "model_type"}
    config = AutoConfig.for_model(SHAPES[name]["model_type"], tie_word_embeddings=True, dtype=torch.bfloat16, **fields)
    config.update({"eos_token_id": None, "bos_token_id": None, "pad_token_id": None})
    config.save_pretrained(folder)


def make_model(name: str, folder: Path, tokenizer: Path) -> None:
    """Write a checkpoint."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(tokenizer, folder, (), shape["vocab_size"])
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT,
        },
    )
    end = {"eos_token_id": ids[END], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
    torch.manual_seed(0)
    fields = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], tie_word_embeddings=True, **fields, **end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(ids.values())] = 0
    model.generation_config.update(do_sample=False, **end)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "layer_types" in shape:  # the names of published files, which llama.cpp's converter reads
        write_json(folder / "config.json", written | {"layer_types": shape["layer_types"]})
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")


def main() -> None:
    """Write the checkpoints that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", type=Path, help="folder with SmolLM2's tokenizer.json")
    kind.add_argument("--configs", action="store_true", help="write configs alone")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    for name in options.shapes:
        if options.configs:
            make_config(name, options.folder / name)
        else:
            make_model(name, options.folder / name, options.tokenizer)


if __name__ == "__main__":
    main()

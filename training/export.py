"""Exports the model as a Hugging Face folder: config, bf16 weights, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.books import HERE
from training.model import Nano
from training.tokens import SPECIAL, token_id

MAX_NEW_TOKENS = 512


def export(model: Nano, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of the folder except its README."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: token_id(tokenizer, token) for token in SPECIAL}
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(model, ids))
    _write(folder / "generation_config.json", {
        "do_sample": False, "temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, "bos_token_id": None,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"],
    })  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.shape.positions,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"],
        "add_bos_token": False, "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")


def _config(model: Nano, ids: dict[str, int]) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.width,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads, "head_dim": shape.head_width, "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"], "torch_dtype": "bfloat16",
    }  # fmt: skip


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Exports the model as a sentence-transformers folder: BERT in bf16, tokenizer, pooling, normalization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.embedder.model import Embedder
from training.embedder.tokens import SPECIAL

MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
POOLING = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def export(model: Embedder, tokenizer: Tokenizer, dimensions: tuple[int, ...], folder: Path) -> None:
    """Write all files of the folder except its README."""
    for name, _ in MODULES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in _weights(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(model, tokenizer, dimensions))
    _write_tokenizer(tokenizer, model.shape.positions, folder)
    _write(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(MODULES)
    ])  # fmt: skip
    modes = {f"pooling_mode_{name}": name == "mean_tokens" for name in POOLING}
    pooling = {"word_embedding_dimension": model.shape.width, **modes, "include_prompt": True}
    _write(folder / "1_Pooling" / "config.json", pooling)
    _write(folder / "2_Normalize" / "config.json", {})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": model.shape.positions, "do_lower_case": False})
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def _weights(model: Embedder) -> dict[str, Tensor]:
    """Return the weights by the names of BertModel, with the parts that training does not use."""
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    types = weights["embeddings.token_type_embeddings.weight"]
    types[1] = types[0]  # a pair in one sequence is embedded like one text
    width = model.shape.width
    return {**weights, "pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}


def _config(model: Embedder, tokenizer: Tokenizer, dimensions: tuple[int, ...]) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["BertModel"], "model_type": "bert",
        "vocab_size": shape.vocabulary, "hidden_size": shape.width,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "intermediate_size": shape.inner,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": shape.positions, "type_vocab_size": 2, "initializer_range": 0.02,
        "layer_norm_eps": shape.norm_eps, "pad_token_id": tokenizer.token_to_id("[PAD]"),
        "position_embedding_type": "absolute", "dtype": "bfloat16", "matryoshka_dimensions": sorted(dimensions),
    }  # fmt: skip


def _write_tokenizer(tokenizer: Tokenizer, longest: int, folder: Path) -> None:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.save(str(folder / "tokenizer.json"))
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **names,
    })  # fmt: skip
    _write(folder / "special_tokens_map.json", names)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

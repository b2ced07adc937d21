"""Small encoders with random weights and the byte tokenizer, as sentence-transformers keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from tests.support.tokenizer import VOCAB_SIZE, write_tokenizer


def tiny_embedder(folder: Path) -> Path:
    """A BERT whose mean is normalized, with a prompt for queries."""
    torch.manual_seed(0)
    BertModel(_config()).save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    _write(folder, "modules.json", modules)
    _write(folder, "1_Pooling/config.json", pooling)
    _write(folder, "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    write_tokenizer(folder, joins=True)
    return folder


def tiny_reranker(folder: Path) -> Path:
    """A cross-encoder of one label."""
    torch.manual_seed(1)
    config = _config()
    config.num_labels = 1
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder, joins=True)
    return folder


def _config() -> BertConfig:
    return BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )


def _write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))

"""Exports the model as a folder of transformers' Whisper, in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from quire.multimodal.audio.features import HOP, SAMPLE_RATE
from training.hear.model import Hear
from training.hear.tokens import END, NO_SPEECH, PREVIOUS, START, Ids

_MAX_INITIAL = 50  # steps of the timestamps: text begins within the first second, as whisper assumes


def export(model: Hear, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of the folder except its README."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in _weights(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = Ids(tokenizer)
    special = {
        "bos_token_id": ids.end,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "decoder_start_token_id": ids.start,
    }
    _write(folder / "config.json", _config(model) | special)
    _write(folder / "generation_config.json", _generation(model, ids) | special)
    _write(folder / "preprocessor_config.json", _extractor(model))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "WhisperTokenizer", "model_max_length": model.shape.targets, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "bos_token": END, "eos_token": END, "pad_token": END, "unk_token": END,
        "additional_special_tokens": [START, PREVIOUS, NO_SPEECH],
    })  # fmt: skip


def _weights(model: Hear) -> dict[str, Tensor]:
    """Return the weights by transformers' names; convolutions as (width, channels, columns)."""
    weights = {
        f"model.{name}": weight.detach().clone()
        for name, weight in model.state_dict().items()
        if not name.startswith("ctc_")
    }
    for name, channels in (("conv1", model.shape.mels), ("conv2", model.shape.width)):
        key = f"model.encoder.{name}.weight"
        weights[key] = weights[key].unflatten(1, (channels, -1))
    return weights


def _config(model: Hear) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "torch_dtype": "bfloat16",
        "vocab_size": model.vocabulary, "num_mel_bins": shape.mels, "d_model": shape.width,
        "encoder_layers": shape.encoder_layers, "encoder_attention_heads": shape.heads, "encoder_ffn_dim": shape.inner,
        "decoder_layers": shape.decoder_layers, "decoder_attention_heads": shape.heads, "decoder_ffn_dim": shape.inner,
        "num_hidden_layers": shape.encoder_layers, "max_source_positions": shape.positions,
        "max_target_positions": shape.targets, "activation_function": "gelu", "scale_embedding": False,
        "is_encoder_decoder": True, "use_cache": True, "tie_word_embeddings": True, "median_filter_width": 7,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip


def _generation(model: Hear, ids: Ids) -> dict[str, Any]:
    return {
        "is_multilingual": True, "lang_to_id": {f"<|{code}|>": token for code, token in ids.languages.items()},
        "task_to_id": {"transcribe": ids.transcribe}, "no_timestamps_token_id": ids.no_timestamps,
        "no_speech_token_id": ids.no_speech, "prev_sot_token_id": ids.previous, "return_timestamps": False,
        "max_initial_timestamp_index": _MAX_INITIAL, "max_length": model.shape.targets,
        "suppress_tokens": [], "begin_suppress_tokens": [],
        "alignment_heads": [[model.shape.decoder_layers - 1, head] for head in range(model.shape.heads)],
    }  # fmt: skip


def _extractor(model: Hear) -> dict[str, Any]:
    seconds = model.shape.seconds
    samples = seconds * SAMPLE_RATE
    return {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": model.shape.mels, "sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": 400,
        "chunk_length": seconds, "n_samples": samples, "nb_max_frames": samples // HOP, "padding_side": "right",
        "padding_value": 0.0, "return_attention_mask": False, "dither": 0.0,
    }  # fmt: skip


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Exports the model as a folder of transformers' Idefics3, in bf16."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.see.model import CHANNELS, LAYER_NORM_EPS, RMS_NORM_EPS, ROPE_THETA, See
from training.see.tokens import AROUND, END, IMAGE, START, STOP, UTTERANCE, Ids

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_NAMES = (
    (r"tower\.patches\.", "model.vision_model.embeddings.patch_embedding."),
    (r"tower\.positions_embed\.", "model.vision_model.embeddings.position_embedding."),
    (r"tower\.layers\.", "model.vision_model.encoder.layers."),
    (r"tower\.", "model.vision_model."),
    (r"connector\.", "model.connector.modality_projection.proj."),
    (r"decoder\.", "model.text_model."),
)
_LANCZOS = 1
_MOST_NEW = 128


def export(model: See, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of the folder except its README."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in _weights(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = Ids(tokenizer)
    _write(folder / "config.json", _config(model, ids))
    _write(folder / "generation_config.json", {
        "do_sample": False, "temperature": 0.0, "max_new_tokens": _MOST_NEW, "bos_token_id": None,
        "eos_token_id": [ids.stop, ids.end], "pad_token_id": ids.end,
    })  # fmt: skip
    _write(folder / "preprocessor_config.json", _image_processor(model))
    _write(folder / "processor_config.json", {
        "processor_class": "Idefics3Processor", "image_seq_len": model.shape.tokens,
    })  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Idefics3Processor",
        "model_max_length": model.shape.positions, "eos_token": STOP, "pad_token": END, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "additional_special_tokens": [START, AROUND, IMAGE, UTTERANCE],
    })  # fmt: skip
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")


def _weights(model: See) -> dict[str, Tensor]:
    """Return the weights by transformers' names, without the heads of patches; the patches' as a convolution."""
    weights = {}
    for name, weight in model.state_dict().items():
        for pattern, replacement in _NAMES:
            if re.match(pattern, name):
                weights[re.sub(pattern, replacement, name, count=1)] = weight.detach().clone()
                break
    key = "model.vision_model.embeddings.patch_embedding.weight"
    weights[key] = weights[key].unflatten(1, (CHANNELS, model.shape.patch, model.shape.patch))
    return weights


def _config(model: See, ids: Ids) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "torch_dtype": "bfloat16",
        "image_token_id": ids.image, "scale_factor": shape.join, "tie_word_embeddings": True, "pad_token_id": ids.end,
        "vision_config": {
            "model_type": "idefics3_vision", "hidden_size": shape.width, "intermediate_size": shape.tower_inner,
            "num_hidden_layers": shape.tower_layers, "num_attention_heads": shape.heads, "num_channels": CHANNELS,
            "image_size": shape.side, "patch_size": shape.patch, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": LAYER_NORM_EPS, "attention_dropout": 0.0,
        },
        "text_config": {
            "model_type": "llama", "hidden_size": shape.width, "intermediate_size": shape.decoder_inner,
            "num_hidden_layers": shape.decoder_layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads, "head_dim": shape.width // shape.heads, "hidden_act": "silu",
            "rms_norm_eps": RMS_NORM_EPS, "rope_theta": ROPE_THETA, "max_position_embeddings": shape.positions,
            "vocab_size": model.vocabulary, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
            "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": ids.stop, "pad_token_id": ids.end,
        },
    }  # fmt: skip


def _image_processor(model: See) -> dict[str, Any]:
    edge = {"longest_edge": model.shape.side}
    return {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "do_convert_rgb": True, "do_resize": True, "size": edge, "resample": _LANCZOS, "do_image_splitting": False,
        "max_image_size": edge, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5] * CHANNELS, "image_std": [0.5] * CHANNELS, "do_pad": True,
    }  # fmt: skip


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Small language models that read pictures, with random weights: the whole of them, as transformers makes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.models import draw_weights

VOCAB = 300
_PICTURE = 290  # the placeholder token
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
_PERCEIVER = {
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _config(text: str, vision: dict[str, Any], *, text_fields: dict[str, Any] | None = None, **fields: Any) -> Any:
    return {
        "text_config": {"model_type": text, **_TEXT, **(text_fields or {})},
        "vision_config": vision,
        "tie_word_embeddings": False,
        **fields,
    }


# Case -> (model type, config). Those whose vision config has no type have one of their own.
COMPOSITES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        _config(
            "gemma3_text",
            {"model_type": "siglip_vision_model", **_VISION},
            text_fields={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"num_hidden_layers": 4},
            tie_word_embeddings=True,
            image_token_index=_PICTURE,
            mm_tokens_per_image=4,
        ),
    ),
    "idefics2": ("idefics2", _config("mistral", {"model_type": "idefics2", **_VISION}, perceiver_config=_PERCEIVER)),
    "idefics3": ("idefics3", _config("llama", {"model_type": "idefics3_vision", **_VISION})),
    "internvl": (
        "internvl",
        _config("qwen2", {"model_type": "internvl_vision", **_VISION}, tie_word_embeddings=True),
    ),
    "internvl-qwen3": ("internvl", _config("qwen3", {"model_type": "internvl_vision", **_VISION})),
    "llava": ("llava", _config("llama", {"model_type": "clip_vision_model", **_VISION}, image_token_index=_PICTURE)),
    "llava_next": (
        "llava_next",
        _config("mistral", {"model_type": "clip_vision_model", **_VISION}, image_token_index=_PICTURE),
    ),
    "llava_onevision": (
        "llava_onevision",
        _config("qwen2", {"model_type": "siglip_vision_model", **_VISION}, image_token_index=_PICTURE),
    ),
    "mistral3": (
        "mistral3",
        _config(
            "mistral",
            {"model_type": "pixtral", **_VISION},
            text_fields={"sliding_window": None},
            image_token_index=_PICTURE,
        ),
    ),
    "ovis2": ("ovis2", _config("qwen2", {"model_type": "ovis2", **_VISION}, tie_word_embeddings=True)),
    "qwen2_vl": (
        "qwen2_vl",
        _config(
            "qwen2_vl_text",
            {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14, "in_channels": 3},
            text_fields={"rope_parameters": _MROPE},
        ),
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        _config("qwen2_5_vl_text", {**_QWEN_VISION, "patch_size": 14}, text_fields={"rope_parameters": _MROPE}),
    ),
    "qwen2_5_vl-tied": (
        "qwen2_5_vl",
        _config(
            "qwen2_5_vl_text",
            {**_QWEN_VISION, "patch_size": 14},
            text_fields={"rope_parameters": _MROPE},
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_vl": (
        "qwen3_vl",
        _config(
            "qwen3_vl_text",
            {**_QWEN_VISION, "patch_size": 14, "deepstack_visual_indexes": [0]},
            text_fields={"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        ),
    ),
    "smolvlm": ("smolvlm", _config("llama", {"model_type": "smolvlm_vision", **_VISION})),
    "vipllava": (
        "vipllava",
        _config(
            "llama",
            {"model_type": "clip_vision_model", **_VISION},
            image_token_index=_PICTURE,
            vision_feature_layers=[-1],
        ),
    ),
}


def make_composite(case: str, *, seed: int = 0) -> Any:
    """Build the whole model of a case in float32, with weights large enough for distinct logits."""
    kind, fields = COMPOSITES[case]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **copy.deepcopy(fields))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, kind)
    model.generation_config.eos_token_id = None
    return model


def save_composite(case: str, folder: Path) -> Path:
    """Save the whole model of a case to a folder, without a tokenizer."""
    make_composite(case).save_pretrained(folder)
    return folder

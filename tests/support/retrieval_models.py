"""Small models that embed pictures, with random weights, as transformers makes them (CLIP, ColPali and others)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, CLIPModel, ColPaliForRetrieval, ColQwen2ForRetrieval, Siglip2Model, SiglipModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from tests.support.models import draw_weights
from tests.support.tiny_configs import VISION, VOCAB
from tests.support.vision_models import COMPOSITES, PICTURE, SEES, text_types, write_image_processor

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "bos_token_id": 298,
    "eos_token_id": 299,
}

_CLASSES = {"clip": CLIPModel, "siglip": SiglipModel, "siglip2": Siglip2Model}
_CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {
        "text_config": {**_TEXT, "projection_dim": 24},
        "vision_config": {**VISION, "projection_dim": 24},
        "projection_dim": 24,
    },
    "siglip": {"text_config": {**_TEXT, "projection_size": 32}, "vision_config": VISION},
    "siglip2": {"text_config": {**_TEXT, "projection_size": 32}, "vision_config": {**VISION, "num_patches": 16}},
}
_PROCESSORS: dict[str, Any] = {
    "clip": CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    "siglip": SiglipImageProcessorPil(size={"height": 28, "width": 28}),
    "siglip2": Siglip2ImageProcessorPil(patch_size=14, max_num_patches=12),
}
DUAL_ENCODERS = tuple(_CLASSES)
_OF_LATE_INTERACTION = {"paligemma": ("colpali", ColPaliForRetrieval), "qwen2_vl": ("colqwen2", ColQwen2ForRetrieval)}


def make_dual_encoder(kind: str) -> Any:
    """Build a model of an encoder of texts and one of pictures."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **copy.deepcopy(_CONFIGS[kind]))
    model = _CLASSES[kind]._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() and "norm" not in name:
                parameter.normal_(0, 0.3)
    return model


def save_dual_encoder(model: Any, kind: str, folder: Path) -> Path:
    """Save it with the config of its image processor, without a tokenizer."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(_PROCESSORS[kind].to_json_string())
    return folder


@torch.inference_mode()
def text_embedding(model: Any, tokens: Sequence[int]) -> Tensor:
    """The normalized embedding of a text."""
    return _normalized(model.get_text_features(input_ids=torch.tensor([tokens])).pooler_output[0])


@torch.inference_mode()
def picture_embedding(model: Any, kind: str, picture: Image.Image) -> Tensor:
    """The normalized embedding of a picture."""
    inputs = dict(_PROCESSORS[kind](images=[picture], return_tensors="pt"))
    return _normalized(model.get_image_features(**inputs).pooler_output[0])


def make_late_interaction(inner: str) -> Any:
    """Build a ColPali or a ColQwen2 on a model of a case in `COMPOSITES`."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind, fields = COMPOSITES[inner]
    vlm = {"model_type": kind, **copy.deepcopy(fields)}
    name, model_class = _OF_LATE_INTERACTION["paligemma" if kind == "paligemma" else "qwen2_vl"]
    config = AutoConfig.for_model(name, vlm_config=vlm, embedding_dim=16)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, kind)
    return model


def save_late_interaction(model: Any, inner: str, folder: Path) -> Path:
    """Save it with the config of its image processor, without a tokenizer."""
    model.save_pretrained(folder)
    write_image_processor(inner, folder)
    return folder


@torch.inference_mode()
def token_embeddings(model: Any, inner: str, prompt: Sequence[int], pictures: list[Image.Image]) -> Tensor:
    """The embeddings of a prompt's tokens, with the rotary positions that the model was trained with.

    transformers' ColQwen2 leaves those of pictures to its caller, and ColPali which tokens attend in both directions.
    """
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    inputs: dict[str, Tensor] = {}
    if pictures:
        inputs = SEES[inner].inputs(SEES[inner].processor, pictures)
    if "image_grid_thw" not in inputs:
        inputs |= text_types(inner, prompt)
    else:
        inputs["position_ids"], _ = model.vlm.get_rope_index(
            ids, image_grid_thw=inputs["image_grid_thw"], attention_mask=mask, mm_token_type_ids=(ids == PICTURE).int()
        )
        patches = inputs["image_grid_thw"].prod(-1).tolist()
        inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(
            list(inputs["pixel_values"].split(patches)), batch_first=True
        )
    embeddings: Tensor = model(input_ids=ids, attention_mask=mask, **inputs).embeddings[0]
    return embeddings


def _normalized(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)

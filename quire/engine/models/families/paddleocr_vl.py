"""PaddleOCR-VL, which reads documents: a tower like SigLIP's for pictures of any size, and Ernie's language model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.rope import axes_in_sections
from quire.engine.models.families.llama import LLAMA, attention, mlp, uniform
from quire.engine.models.families.qwen_vl import grid_tower, with_axes
from quire.engine.models.families.vision_language import language_model, vision_language_model
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<part>visual|projector|mlp_AR)\.(?P<name>.*)")
# What the tower of published checkpoints has beside that of transformers: it is not used.
_UNUSED = re.compile(r"vision_model\.(?:head\..*|embeddings\.(?:packing_position_embedding|position_ids).*)")
_SECTIONS = (16, 24, 24)  # pairs of elements of time, height and width, if a config does not say


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to the language model or is not used."""
    match = _READ.fullmatch(name)
    if match is None or _UNUSED.fullmatch(match["name"]):
        return None
    part = "visual" if match["part"] == "visual" else "projector"
    return f"{part}.{match['name']}"


def paddleocr_vl_text(config: Any) -> DecoderSpec:
    """The language model."""
    bias = bool(config.use_bias)
    return uniform(config, attention(config, qkv_bias=bias, out_bias=bias), mlp(config, bias=bias))


def _spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    return with_axes(language_model(config, text), axes_in_sections(config.text_config, _SECTIONS))


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """Patches lie row by row; those of a token are joined behind the tower."""
    edge = model.config.vision_config.patch_size
    colors, height, width = pixels.shape[1:]
    rows, columns = height // edge, width // edge
    patches = pixels.view(colors, rows, edge, columns, edge).permute(1, 3, 0, 2, 4).flatten(0, 1)
    grid = pixels.new_tensor([[1, rows, columns]]).long()
    features: Tensor = model.get_image_features(pixel_values=patches, image_grid_thw=grid).pooler_output[0]
    return features


FAMILIES = (
    Family(name="paddleocr_vl_text", config_types=("paddleocr_vl_text",), spec=paddleocr_vl_text, tensors=LLAMA),
    vision_language_model(
        "paddleocr_vl",
        grid_tower("paddleocrvl", placeholder="<|IMAGE_PLACEHOLDER|>", encode=_encode, module_name=module_name),
        _spec,
    ),
)

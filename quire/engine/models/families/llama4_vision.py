"""Llama 4: a tower that reads tiles, whose patches are joined by fours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor, check_image_size
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.vision_language import vision_language_model
from quire.engine.models.family import PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>(?:vision_model|multi_modal_projector)\..*)")


def _module_name(name: str) -> str | None:
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """One tile."""
    encoded = model.get_image_features(pixel_values=pixels, return_dict=True).last_hidden_state
    features: Tensor = model.multi_modal_projector(encoded[0])
    return features


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    vision = config.vision_config
    processor = ImageProcessor.read(folder, "llama4")
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_index")
    geometry = processor.canvas_tiles(_tokens(vision))
    check_image_size(geometry, vision)
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=geometry.whole,
        geometry=geometry,
        token_text=text_of(folder, placeholder, "<|patch|>"),
        before=text_of(folder, config.boi_token_index, "<|image_start|>"),
        after=text_of(folder, config.eoi_token_index, "<|image_end|>"),
    )
    return PictureFacts(info=info, normalization=processor.normalization())


def _tokens(vision: Any) -> int:
    """Tokens of a tile."""
    size, patch, ratio = vision.image_size, vision.patch_size, vision.pixel_shuffle_ratio
    if type(size) is not int or type(patch) is not int or not 0 < patch <= size or not 0 < ratio <= 1:
        raise UnsupportedModel(
            f"vision_config has image_size {size!r}, patch_size {patch!r} and pixel_shuffle_ratio {ratio!r}; supported "
            "are square tiles and patches, and a ratio of at most 1"
        )
    tokens = int(size // patch * ratio) ** 2
    if not tokens:
        raise UnsupportedModel(f"vision_config: tiles of {size} pixels have no token")
    return tokens


FAMILIES = (
    vision_language_model(
        "llama4",
        Tower(language_model="language_model", facts=_facts, encode=_encode, module_name=_module_name),
    ),
)

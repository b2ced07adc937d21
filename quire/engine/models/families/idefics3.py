"""Idefics 3 and SmolVLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.families.vision_language import vision_language_model
from quire.engine.models.family import PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>(?:vision_model|connector)\..*)")


def _module_name(name: str) -> str | None:
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    features: Tensor = model.get_image_features(pixel_values=pixels[None]).pooler_output[0]
    return features


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    vision, joined = config.vision_config, config.scale_factor**2
    processor = ImageProcessor.read(folder, config.model_type)
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_id")
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<image>"),
        geometry=processor.split_tiles((vision.image_size // vision.patch_size) ** 2 // joined),
    )
    return PictureFacts(info=info, normalization=processor.normalization())


FAMILIES = tuple(
    vision_language_model(
        kind, Tower(language_model="text_model", facts=_facts, encode=_encode, module_name=_module_name)
    )
    for kind in ("idefics3", "smolvlm")
)

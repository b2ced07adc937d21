"""Idefics 3 and SmolVLM."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from quire.engine.client.pictures import PictureInfo, VideoInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.video_processor import VideoProcessor, video_of
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
    text, tokens = text_of(folder, placeholder, "<image>"), (vision.image_size // vision.patch_size) ** 2 // joined
    normalization = processor.normalization()
    info = PictureInfo(placeholder=placeholder, placeholder_text=text, geometry=processor.split_tiles(tokens))
    if config.model_type == "smolvlm":
        video = video_of(folder, normalization, partial(_video, folder, info, tokens))
        info = structs.replace(info, video=video)
    return PictureFacts(info=info, normalization=normalization)


def _video(folder: Path, info: PictureInfo, tokens: int) -> tuple[VideoProcessor, VideoInfo]:
    """Each frame is a picture that is not divided, with its time in front."""
    processor = VideoProcessor.read(folder, "smolvlm")
    return processor, VideoInfo(
        placeholder=info.placeholder,
        placeholder_text="<video>",
        geometry=processor.frame_tile(tokens),
        sampling=processor.sampling(),
        text="smolvlm",
        token_text=info.token,
    )


FAMILIES = tuple(
    vision_language_model(
        kind, Tower(language_model="text_model", facts=_facts, encode=_encode, module_name=_module_name)
    )
    for kind in ("idefics3", "smolvlm")
)

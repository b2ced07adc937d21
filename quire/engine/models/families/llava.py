"""LLaVA and its relatives, InternVL and Mistral 3: a tower, a projector and a language model."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from quire.engine.client.pictures import Geometry, PictureInfo, VideoInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor, check_image_size
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.video_processor import VideoProcessor, video_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.vision_language import vision_language_model
from quire.engine.models.family import PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>(?:vision_tower|multi_modal_projector|image_newline)(?:\..*)?)")
_INNER = re.compile(r"vision_tower\.vision_model\.")  # CLIP and SigLIP in checkpoints
_VIDEO = "<video>"
_TABLE = re.compile(r".*\.position_ids")  # which old checkpoints have


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to the language model or is not needed."""
    match = _READ.fullmatch(name)
    if match is None or _TABLE.fullmatch(name):
        return None
    return _INNER.sub("vision_tower.", match["name"])


def _encode_fixed(model: Any, pixels: Tensor, item: PictureItem) -> Tensor:
    """LLaVA: one image of a size, or, with Pixtral's tower, of any."""
    if model.config.vision_config.model_type == "pixtral":
        return _encode_rows(model, pixels, item)
    features: Tensor = model.get_image_features(pixel_values=pixels).pooler_output[0]
    return features


def _encode_rows(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """Mistral 3: one image, whose height and width the tower needs to know."""
    edge = model.config.vision_config.patch_size * getattr(model.config, "spatial_merge_size", 1)
    if max(pixels.shape[-2:]) < 2 * edge:
        pixels = pixels.repeat(2, 1, 1, 1)  # of one token alone, transformers would drop a dimension
    sizes = [tuple(pixels.shape[-2:])] * len(pixels)
    features: Tensor = model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output[0]
    return features


def _encode_canvas(model: Any, pixels: Tensor, item: PictureItem) -> Tensor:
    """LLaVA-NeXT: the whole picture and its tiles, of which some patches are padding."""
    assert item.original_size is not None
    sizes = pixels.new_tensor([item.original_size]).long()
    features: Tensor = model.get_image_features(pixel_values=pixels[None], image_sizes=sizes).pooler_output[0]
    return features


def _encode_canvas_or_whole(model: Any, pixels: Tensor, item: PictureItem) -> Tensor:
    """LLaVA-OneVision: as LLaVA-NeXT, but of several pictures in a prompt, each is one image.

    Tokens of frames are pooled. A newline follows them; it belongs to the last frame.
    """
    if item.is_video:
        frames: Tensor = model.get_video_features(pixel_values_videos=pixels[None]).pooler_output[0]
        return frames[: item.length]
    assert item.original_size is not None
    sizes = pixels.new_tensor([item.original_size]).long()
    pictures = pixels.new_tensor([1 if len(pixels) > 1 else 2]).long()
    features: Tensor = model.get_image_features(
        pixel_values=pixels[None], image_sizes=sizes, batch_num_images=pictures
    ).pooler_output[0]
    return features


def _encode_tiles(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """InternVL and ViP-LLaVA: tiles, whose tokens lie one behind the other."""
    features: Tensor = model.get_image_features(pixel_values=pixels).pooler_output
    return features.flatten(0, 1)


def _info(
    folder: Path, config: Any, spec: DecoderSpec, geometry: Geometry, before: str = "", after: str = ""
) -> PictureInfo:
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_id")
    return PictureInfo(
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<image>"),
        geometry=geometry,
        before=before,
        after=after,
    )


def _patches(vision: Any) -> int:
    """Number of patches along the edge of an image."""
    size, patch = (value if isinstance(value, int) else value[0] for value in (vision.image_size, vision.patch_size))
    return int(size // patch)


def _whole_tokens(config: Any) -> int:
    """Tokens of an image of the tower's size."""
    vision = config.vision_config
    classes = int(vision.model_type == "clip_vision_model")
    dropped = int(config.vision_feature_select_strategy == "default")
    return _patches(vision) ** 2 + classes - dropped


def _llava(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    if config.vision_config.model_type == "pixtral":
        return _mistral3(folder, config, spec)
    processor = ImageProcessor.read(folder, "clip")
    geometry = processor.fixed_size(_whole_tokens(config))
    check_image_size(geometry, config.vision_config)
    return PictureFacts(info=_info(folder, config, spec, geometry), normalization=processor.normalization())


def _vipllava(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "clip")
    geometry = processor.fixed_size(_patches(config.vision_config) ** 2)
    check_image_size(geometry, config.vision_config)
    return PictureFacts(info=_info(folder, config, spec, geometry), normalization=processor.normalization())


def _mistral3(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "pixtral")
    geometry = processor.patch_rows(getattr(config, "spatial_merge_size", 1))
    return PictureFacts(info=_info(folder, config, spec, geometry), normalization=processor.normalization())


def _llava_next(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "llavanext")
    geometry = processor.any_resolution(patches=_patches(config.vision_config), tokens=_whole_tokens(config))
    return PictureFacts(info=_info(folder, config, spec, geometry), normalization=processor.normalization())


def _llava_onevision(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "llavaonevision")
    aspect = re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)
    if aspect is None:
        raise UnsupportedModel(f"vision_aspect_ratio is {config.vision_aspect_ratio!r}; supported is anyres_max_N")
    geometry = processor.any_resolution(
        patches=_patches(config.vision_config), tokens=_whole_tokens(config), max_tiles=int(aspect[1])
    )
    normalization = processor.normalization()
    video = video_of(folder, normalization, partial(_pooled_video, folder, config, spec.vocab))
    info = structs.replace(_info(folder, config, spec, geometry), video=video)
    return PictureFacts(info=info, normalization=normalization)


def _pooled_video(folder: Path, config: Any, vocab: int) -> tuple[VideoProcessor, VideoInfo]:
    processor = VideoProcessor.read(folder, "llavaonevision")
    token = check_placeholder(config.video_token_id, vocab, "video_token_id")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, token, _VIDEO),
        geometry=processor.frame_size(math.ceil(_patches(config.vision_config) / 2) ** 2),
        sampling=processor.sampling(),
        newline=True,
    )


def _internvl(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "gotocr2")
    geometry = processor.grid_tiles(int(_patches(config.vision_config) * config.downsample_ratio) ** 2)
    info = _info(folder, config, spec, geometry, before="<img>", after="</img>")
    normalization = processor.normalization()
    video = video_of(folder, normalization, partial(_listed_video, folder, info, geometry.tokens))
    return PictureFacts(info=structs.replace(info, video=video), normalization=normalization)


def _listed_video(folder: Path, info: PictureInfo, tokens: int) -> tuple[VideoProcessor, VideoInfo]:
    """Each frame is a picture of one tile, with its number in front."""
    processor = VideoProcessor.read(folder, "internvl")
    return processor, VideoInfo(
        placeholder=info.placeholder,
        placeholder_text=_VIDEO,
        geometry=processor.frame_size(tokens),
        sampling=processor.sampling(),
        text="internvl",
        token_text=info.token,
        before=info.before,
        after=info.after,
    )


FAMILIES = tuple(
    vision_language_model(
        kind, Tower(language_model="language_model", facts=facts, encode=encode, module_name=module_name)
    )
    for kind, facts, encode in (
        ("llava", _llava, _encode_fixed),
        ("llava_next", _llava_next, _encode_canvas),
        ("llava_onevision", _llava_onevision, _encode_canvas_or_whole),
        ("internvl", _internvl, _encode_tiles),
        ("mistral3", _mistral3, _encode_rows),
        ("vipllava", _vipllava, _encode_tiles),
    )
)

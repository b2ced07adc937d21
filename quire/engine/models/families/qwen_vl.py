"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: tokens of pictures have rotary positions of time, height and width."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo, VideoInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.rope import axes_in_sections, interleaved_axes
from quire.engine.models.config.video_processor import VideoProcessor, video_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import head_dim
from quire.engine.models.families.vision_language import language_model, vision_language_model
from quire.engine.models.family import PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>visual\..*)")
# Pairs of elements of time, height and width, if a config does not say.
_SECTIONS = (16, 24, 24)
_INTERLEAVED = (24, 20, 20)
_INTERLEAVED_PART = (11, 11, 10)  # of heads of which a part is rotated


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to the language model."""
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def with_axes(spec: DecoderSpec, axes: tuple[int, ...]) -> DecoderSpec:
    """The language model with ropes of three positions; see `Rope.axes`."""
    layers = []
    for layer in spec.layers:
        if not isinstance(layer.attn, GroupedQueryAttention) or layer.attn.rope is None:
            layers.append(layer)
            continue
        pairs = len(layer.attn.rope.inv_freq)
        if len(axes) != pairs:
            raise UnsupportedModel(f"mrope_section has {len(axes)} pairs of elements, but a head has {pairs}")
        layers.append(replace(layer, attn=replace(layer.attn, rope=replace(layer.attn.rope, axes=axes))))
    return replace(spec, layers=tuple(layers))


def spec_with_sections(config: Any, text: DecoderSpec) -> DecoderSpec:
    """The language model of Qwen2-VL and Qwen2.5-VL."""
    axes = axes_in_sections(config.text_config, _SECTIONS)
    return with_axes(language_model(config, text), axes)


def _interleaved_spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    axes = interleaved_axes(config.text_config, head_dim(config.text_config) // 2, _INTERLEAVED)
    return with_axes(language_model(config, text), axes)


def _partly_interleaved_spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    """The language model of Qwen3.5, which rotates a part of each head."""
    ropes = [layer.attn.rope for layer in text.layers if layer.attn.rope is not None]
    pairs = len(ropes[0].inv_freq) if ropes else 0
    return with_axes(language_model(config, text), interleaved_axes(config.text_config, pairs, _INTERLEAVED_PART))


def patches(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (patches, size) of a picture or frames, those of a token one behind the other, and their grid (1, 3).

    A patch has several frames, which are equal in a still picture.
    """
    vision = model.config.vision_config
    patch, merged, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    if len(pixels) == 1:
        pixels = pixels.expand(frames, -1, -1, -1)
    count, colors, height, width = pixels.shape
    groups, rows, columns = count // frames, height // patch, width // patch
    squares = pixels.reshape(groups, frames, colors, rows // merged, merged, patch, columns // merged, merged, patch)
    ordered = squares.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # rows and columns of tokens, then of their patches
    flat = ordered.reshape(groups * rows * columns, -1)
    return flat, pixels.new_tensor([[groups, rows, columns]]).long()


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    flat, grid = patches(model, pixels)
    features: Tensor = model.get_image_features(pixel_values=flat, image_grid_thw=grid).pooler_output[0]
    return features


def _encode_levels(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """Qwen3-VL: the levels of a token's embedding follow it; see `ItemEmbeddings`."""
    import torch  # noqa: PLC0415 families are read without it

    flat, grid = patches(model, pixels)
    features = model.get_image_features(pixel_values=flat, image_grid_thw=grid)
    parts = [features.pooler_output[0], *(level[0] for level in features.deepstack_features)]
    joined: Tensor = torch.cat(parts, -1)
    return joined


def grid_tower(
    processor: str,
    *,
    placeholder: str,
    video: Callable[[Path, Any, int], tuple[VideoProcessor, VideoInfo]] | None = None,
    levels: Callable[[Any], int] | None = None,
    encode: Callable[[Any, Tensor, PictureItem], Tensor] = _encode,
    module_name: Callable[[str], str | None] = module_name,
    unused: tuple[str, ...] = (),
) -> Tower:
    """The part that reads pictures.

    Args:
        processor: image processor of models of this type.
        placeholder: text of the placeholder token, if the tokenizer does not have it.
        video: reads how videos become items; given the folder, the config, and the size of the vocabulary. None: the
            model does not read them.
        levels: reads `PictureFacts.levels` in the config of the part; None: tokens have no such embeddings.
        encode, module_name, unused: see `Tower`.
    """

    def facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
        vision, image_processor = config.vision_config, ImageProcessor.read(folder, processor)
        geometry = image_processor.smart_resize()
        edge = vision.patch_size * vision.spatial_merge_size
        if geometry.multiple != edge:
            raise UnsupportedModel(
                f"a token stands for {edge}x{edge} pixels in config.json, but for {geometry.multiple}x"
                f"{geometry.multiple} in preprocessor_config.json"
            )
        count = 0 if levels is None else levels(vision)
        if count >= len(spec.layers):
            raise UnsupportedModel(
                f"embeddings have {count} levels; the language model must have more layers, not {len(spec.layers)}"
            )
        token = check_placeholder(config.image_token_id, spec.vocab, "image_token_id")
        normalization = image_processor.normalization()
        info = PictureInfo(
            placeholder=token,
            placeholder_text=text_of(folder, token, placeholder),
            geometry=geometry,
            video=None
            if video is None
            else video_of(folder, normalization, partial(video, folder, config, spec.vocab)),
        )
        return PictureFacts(info=info, normalization=normalization, levels=count)

    return Tower(
        language_model="language_model",
        facts=facts,
        encode=encode if levels is None else _encode_levels,
        module_name=module_name,
        unused=unused,
        has_rotary_qkv=True,
    )


def _levels(vision: Any) -> int:
    return len(vision.deepstack_visual_indexes)


def _continuous_video(folder: Path, config: Any, vocab: int) -> tuple[VideoProcessor, VideoInfo]:
    """Qwen2-VL and Qwen2.5-VL: frames follow each other, and positions of time tell when they are seen."""
    processor = VideoProcessor.read(folder, "qwen2vl")
    token = check_placeholder(config.video_token_id, vocab, "video_token_id")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, token, _VIDEO),
        geometry=processor.frame_area(),
        sampling=processor.sampling(),
        group=config.vision_config.temporal_patch_size,
        is_timed=True,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
    )


def _video_with_times(folder: Path, config: Any, vocab: int) -> tuple[VideoProcessor, VideoInfo]:
    """Qwen3-VL: in front of each pair of frames a text says when it is seen."""
    processor = VideoProcessor.read(folder, "qwen3vl")
    token = check_placeholder(config.video_token_id, vocab, "video_token_id")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, token, _VIDEO),
        geometry=processor.frame_area(),
        sampling=processor.sampling(),
        text="qwen3_vl",
        before="<|vision_start|>",
        after="<|vision_end|>",
        group=config.vision_config.temporal_patch_size,
        shares_area=True,
    )


_VIDEO = "<|video_pad|>"
QWEN2_TOWER = grid_tower("qwen2vl", placeholder="<|image_pad|>", video=_continuous_video)
_QWEN3 = grid_tower("qwen2vl", placeholder="<|image_pad|>", video=_video_with_times, levels=_levels)
_QWEN3_5 = grid_tower("qwen2vl", placeholder="<|image_pad|>", video=_video_with_times)
FAMILIES = (
    vision_language_model("qwen2_vl", QWEN2_TOWER, spec_with_sections),
    vision_language_model("qwen2_5_vl", QWEN2_TOWER, spec_with_sections),
    vision_language_model("qwen3_vl", _QWEN3, _interleaved_spec),
    vision_language_model("qwen3_vl_moe", _QWEN3, _interleaved_spec),
    vision_language_model("qwen3_5", _QWEN3_5, _partly_interleaved_spec),
    vision_language_model("qwen3_5_moe", _QWEN3_5, _partly_interleaved_spec),
)

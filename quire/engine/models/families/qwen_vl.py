"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: tokens of pictures have rotary positions of time, height and width."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.rope import axes_in_sections, interleaved_axes
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


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to the language model."""
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def with_axes(spec: DecoderSpec, axes: tuple[int, ...]) -> DecoderSpec:
    """The language model with ropes of three positions; see `Rope.axes`."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.attn, GroupedQueryAttention)
        assert layer.attn.rope is not None
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


def patches(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (patches, size) of an image, those of a token one behind the other, and their grid (1, 3).

    A patch has several frames, which are equal in a still picture.
    """
    vision = model.config.vision_config
    patch, merged, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    _, colors, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    squares = pixels.view(colors, rows // merged, merged, patch, columns // merged, merged, patch)
    ordered = squares.permute(1, 4, 2, 5, 0, 3, 6)  # rows and columns of tokens, then of their patches
    flat = ordered.reshape(rows * columns, colors, 1, patch * patch).expand(-1, -1, frames, -1)
    return flat.reshape(rows * columns, -1), pixels.new_tensor([[1, rows, columns]]).long()


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
    levels: Callable[[Any], int] | None = None,
    encode: Callable[[Any, Tensor, PictureItem], Tensor] = _encode,
    module_name: Callable[[str], str | None] = module_name,
    unused: tuple[str, ...] = (),
) -> Tower:
    """The part that reads pictures.

    Args:
        processor: image processor of models of this type.
        placeholder: text of the placeholder token, if the tokenizer does not have it.
        levels: reads `PictureFacts.levels` in the config of the part; None: tokens have no such embeddings.
        encode, module_name, unused: see `Tower`.
    """

    def facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
        vision, read = config.vision_config, ImageProcessor.read(folder, processor)
        geometry = read.smart_resize()
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
        info = PictureInfo(placeholder=token, placeholder_text=text_of(folder, token, placeholder), geometry=geometry)
        return PictureFacts(info=info, normalization=read.normalization(), levels=count)

    return Tower(
        language_model="language_model",
        facts=facts,
        encode=encode if levels is None else _encode_levels,
        module_name=module_name,
        unused=unused,
    )


def _levels(vision: Any) -> int:
    return len(vision.deepstack_visual_indexes)


QWEN2_TOWER = grid_tower("qwen2vl", placeholder="<|image_pad|>")
_QWEN3 = grid_tower("qwen2vl", placeholder="<|image_pad|>", levels=_levels)
FAMILIES = (
    vision_language_model("qwen2_vl", QWEN2_TOWER, spec_with_sections),
    vision_language_model("qwen2_5_vl", QWEN2_TOWER, spec_with_sections),
    vision_language_model("qwen3_vl", _QWEN3, _interleaved_spec),
    vision_language_model("qwen3_vl_moe", _QWEN3, _interleaved_spec),
)

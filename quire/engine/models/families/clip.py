"""CLIP and SigLIP: an encoder of texts and one of pictures, whose embeddings are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import Geometry, PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor, check_image_size
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import PictureFacts, TwoTowers
from quire.engine.models.specs.dual_encoder import DualEncoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor


def _layers(config: Any) -> int:
    layers: int = config.text_config.num_hidden_layers + config.vision_config.num_hidden_layers
    return layers


def _clip_spec(config: Any) -> DualEncoderSpec:
    text = config.text_config
    return DualEncoderSpec(
        size=config.projection_dim,
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        layers=_layers(config),
    )


def _siglip_spec(config: Any) -> DualEncoderSpec:
    text = config.text_config
    size = text.projection_size or text.hidden_size
    if size != config.vision_config.hidden_size:
        raise UnsupportedModel(
            f"embeddings of texts have {size} elements, and those of pictures {config.vision_config.hidden_size}"
        )
    return DualEncoderSpec(
        size=size,
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        layers=_layers(config),
        pads=True,
    )


def _facts(processor: ImageProcessor, geometry: Geometry) -> PictureFacts:
    info = PictureInfo(placeholder=0, placeholder_text="", geometry=geometry, item_tokens=1, alone=True)
    return PictureFacts(info=info, normalization=processor.normalization())


def _fixed_size(kind: str) -> Callable[[Path, Any], PictureFacts]:
    def facts(folder: Path, config: Any) -> PictureFacts:
        processor = ImageProcessor.read(folder, kind)
        geometry = processor.fixed_size(1)
        check_image_size(geometry, config.vision_config)
        return _facts(processor, geometry)

    return facts


def _any_shape(folder: Path, config: Any) -> PictureFacts:
    processor = ImageProcessor.read(folder, "siglip2")
    geometry = processor.patch_budget(1)
    if geometry.patch != config.vision_config.patch_size:
        raise UnsupportedModel(
            f"patches have {config.vision_config.patch_size} pixels in config.json, but {geometry.patch} in "
            "preprocessor_config.json"
        )
    return _facts(processor, geometry)


def _encode_texts(model: Any, tokens: Tensor) -> Tensor:
    features: Tensor = model.get_text_features(input_ids=tokens).pooler_output
    return features


def _encode_picture(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    features: Tensor = model.get_image_features(pixel_values=pixels).pooler_output
    return features


def _encode_patches(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """SigLIP 2: a picture of any shape."""
    patch = model.config.vision_config.patch_size
    colors, height, width = pixels.shape[1:]
    rows, columns = height // patch, width // patch
    squares = pixels.view(colors, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
    shape = pixels.new_tensor([[rows, columns]]).long()
    features: Tensor = model.get_image_features(
        pixel_values=squares.reshape(1, rows * columns, -1), spatial_shapes=shape
    ).pooler_output
    return features


FAMILIES = (
    TwoTowers(
        name="clip",
        config_types=("clip",),
        spec=_clip_spec,
        pictures=_fixed_size("clip"),
        encode_texts=_encode_texts,
        encode_picture=_encode_picture,
    ),
    TwoTowers(
        name="siglip",
        config_types=("siglip",),
        spec=_siglip_spec,
        pictures=_fixed_size("siglip"),
        encode_texts=_encode_texts,
        encode_picture=_encode_picture,
    ),
    TwoTowers(
        name="siglip2",
        config_types=("siglip2",),
        spec=_siglip_spec,
        pictures=_any_shape,
        encode_texts=_encode_texts,
        encode_picture=_encode_patches,
    ),
)

"""The memory that encoders of items take: embeddings that are kept, and what a picture needs while it is encoded."""

from __future__ import annotations

import logging
import math
from typing import cast

import numpy as np
import torch
from msgspec import structs

from quire.config.options import EngineOptions
from quire.engine.client.audio import AudioInfo
from quire.engine.client.pictures import (
    MAX_RATIO,
    AnyResolution,
    CanvasTiles,
    FrameGeometry,
    Geometry,
    PaddedTiles,
    PatchBudget,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
    TokenBudget,
    TransformersProcessor,
    VideoInfo,
)
from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.models.layers.linear import Linear
from quire.engine.models.loader import LoadedModel, bytes_of
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.networks.vision_encoder import VisionEncoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.scheduling.items import pixels_of
from quire.engine.scheduling.limits import Bidirectional

logger = logging.getLogger(__name__)
_SMALL_PICTURE = 1024  # tokens, which are always encoded
_LARGE_PICTURE = 4096  # tokens, for which there is room in any encoder cache
_GROWING = SmartResize | PatchRows | PaddedTiles | TokenBudget  # geometries in which large pictures become large items
# Values of float32 for each patch and each output of the widest linear layer that a tower holds at a time, at most:
# projections before and after they are rotated, or both halves of a feed-forward, their product and its input.
_VALUES = 4


def cached_embeddings(loaded: LoadedModel, options: EngineOptions) -> int:
    """Embeddings of items that are kept: as many as --encoder-cache-memory has room for, at least those of one item."""
    audio, pictures = loaded.audio, loaded.pictures
    if audio is None and pictures is None:
        return 0
    most_of_audio = 0 if audio is None else audio.lengths.tokens(audio.item_columns)
    most_of_a_picture = 0 if pictures is None else min(_LARGE_PICTURE, loaded.context_len)
    if bidirectional_tokens(loaded) == "prompt":  # a step reads all pictures of a prompt
        most_of_a_picture = max(most_of_a_picture, options.max_num_batched_tokens)
    return max(int(options.encoder_cache_memory) // embedding_bytes(loaded), most_of_audio, most_of_a_picture)


def bidirectional_tokens(loaded: LoadedModel) -> Bidirectional | None:
    """Which tokens attend to each other in both directions."""
    spec = loaded.model.spec if isinstance(loaded.model, Decoder) else None
    if isinstance(spec, DecoderSpec) and spec.prefix_lm:
        return "prompt"
    return "pictures" if loaded.pictures is not None and loaded.pictures.info.bidirectional else None


def marks_audio(loaded: LoadedModel) -> bool:
    """See `SchedulerLimits.marks_audio`."""
    spec = loaded.model.spec if isinstance(loaded.model, Decoder) else None
    return isinstance(spec, DecoderSpec) and spec.encoder is not None and spec.encoder.picture_projector


def embedding_bytes(loaded: LoadedModel) -> int:
    """Bytes of an embedding that is kept, with its levels; 0 if there are none."""
    if loaded.audio is None and loaded.pictures is None:
        return 0
    levels = 0 if loaded.pictures is None else loaded.pictures.levels
    return cast("Decoder", loaded.model).spec.hidden * (1 + levels) * loaded.dtype.itemsize


def item_tokens(geometry: Geometry, token_limit: int) -> int:
    """Most tokens of an item of a picture.

    What a request may set is bounded by what the model's own config allows: memory is measured for so much.

    Args:
        geometry: that of the model.
        token_limit: tokens that fit into the context and the encoder cache.
    """
    match geometry:
        case SmartResize():
            return min(token_limit, _most_smart_tokens(geometry))
        case PatchRows():
            rows = math.ceil(geometry.longest_edge / geometry.patch)
            return min(token_limit, rows * (rows + 1))
        case TokenBudget():
            return min(token_limit, geometry.largest)
        case PaddedTiles():
            # The tokens of tiles, and at most one for each row that ends.
            tokens = geometry.max_tiles * geometry.edge * (geometry.edge + 1) + geometry.tokens((), ())
            return min(token_limit, tokens)
        case _:
            return token_limit


def _most_smart_tokens(smart: SmartResize) -> int:
    area = smart.frames * smart.multiple**2
    most, least = smart.max_pixels // area, math.ceil(smart.min_pixels / area)
    # A long picture is at least a token high; the edges of one that is enlarged are rounded up.
    return max(most, math.isqrt(most * MAX_RATIO), least + 2 * math.isqrt(least * MAX_RATIO) + 2)


def largest_picture(geometry: Geometry, token_limit: int) -> PictureItem:
    """A black picture that takes as much memory as any. Its number of tokens is not right: encoders do not read it.

    `token_limit`: see `item_tokens`.
    """
    images, original, tokens = 1, None, item_tokens(geometry, token_limit)
    match geometry:
        case SmartResize() | TokenBudget():
            rows = max(1, math.isqrt(tokens))
            height, width = rows * geometry.multiple, max(1, tokens // rows) * geometry.multiple
        case PatchRows():
            height = width = max(1, math.isqrt(tokens)) * geometry.patch
        case SplitTiles() | CanvasTiles():
            height = width = geometry.tile
        case AnyResolution():
            height = width = geometry.tile
            original = max(geometry.canvases, key=math.prod)
            images += math.prod(original) // geometry.tile**2
        case PaddedTiles():
            height = width = geometry.tile
            images = geometry.max_tiles
            original = height * images, width
        case PatchBudget():
            height = width = math.isqrt(geometry.max_patches) * geometry.patch
        case TransformersProcessor():
            raise TypeError("only the model's processor makes pictures for it: see `VisionEncoder.largest`")
        case _:
            height, width = geometry.height, geometry.width
    pixels = np.zeros((images, height, width, 3), np.uint8)
    return PictureItem(hash=b"", length=tokens, pixels=pixels, original_size=original)


def largest_frames(video: VideoInfo, token_limit: int) -> PictureItem:
    """Black frames of a video that are encoded together and take as much memory as any; see `largest_picture`."""
    picture = largest_picture(_frame_geometry(video), token_limit)
    pixels = np.zeros((video.group, *picture.pixels.shape[1:]), np.uint8)
    return structs.replace(picture, pixels=pixels, is_video=True)


def _frame_geometry(video: VideoInfo) -> FrameGeometry:
    """The geometry of a frame in the shortest video: if all frames share an area, it has the most of it."""
    geometry = video.geometry
    if isinstance(geometry, SmartResize) and video.shares_area:
        return structs.replace(geometry, frames=video.group)
    return geometry


def max_item_tokens(info: PictureInfo, token_limit: int) -> int:
    """Most tokens of an item of a picture or video; see `item_tokens`."""
    geometries = [info.geometry] if info.video is None else [info.geometry, _frame_geometry(info.video)]
    return max(item_tokens(geometry, token_limit) for geometry in geometries)


@torch.inference_mode()
def encode_largest_picture(loaded: LoadedModel, options: EngineOptions) -> None:
    """Encode a picture and frames that take as much memory as any, if the model reads them."""
    vision = vision_of(loaded)
    if vision is None:
        return
    assert loaded.pictures is not None
    info, token_limit = loaded.pictures.info, _token_limit(loaded, options)
    vision.encode(vision.largest or largest_picture(info.geometry, token_limit))
    if info.video is not None:
        vision.encode(largest_frames(info.video, token_limit))
    if vision.audio is not None and loaded.audio is not None:
        vision.encode_audio(longest_item(loaded.audio))


def longest_item(audio: AudioInfo) -> AudioItem:
    """Silence that takes as much memory as any item of audio."""
    features = np.zeros((audio.num_mel_bins, audio.item_columns), np.float32)
    return AudioItem(hash=b"", length=audio.lengths.tokens(audio.item_columns), features=features)


def fitting_tokens(loaded: LoadedModel, tokens: int, left: int) -> int:
    """Most tokens of a picture, or of frames that are encoded together, for which the host has memory.

    Args:
        loaded: a model that reads pictures.
        tokens: see `max_item_tokens`.
        left: bytes of memory that nothing else takes.
    """
    vision = vision_of(loaded)
    assert loaded.pictures is not None
    assert vision is not None
    info = loaded.pictures.info
    if vision.largest is not None:  # what its size depends on is not known
        return tokens
    needed = _picture_bytes(vision, largest_picture(info.geometry, tokens))
    if info.video is not None:
        needed = max(needed, _picture_bytes(vision, largest_frames(info.video, tokens), info.video.group))
    if vision.audio is not None and loaded.audio is not None:
        _warn_of(_audio_bytes(vision, loaded.audio), left, "audio")
    if needed <= left:
        return tokens
    if not isinstance(info.geometry, _GROWING):
        _warn_of(needed, left, "a picture")
        return tokens
    fitting = max(min(tokens, _SMALL_PICTURE), tokens * left // needed)
    logger.warning("pictures and frames of more than %d tokens are refused: there is no memory to encode them", fitting)
    return fitting


def _warn_of(needed: int, left: int, medium: str) -> None:
    """Warn that there is too little memory to encode a medium, if there is. `needed`, `left`: in bytes."""
    if needed > left:
        logger.warning(
            "%s may take %d MiB while it is encoded, but %d MiB of memory are left: lower --kv-cache-memory-bytes or "
            "--encoder-cache-memory",
            medium,
            needed >> 20,
            max(0, left) >> 20,
        )


def _picture_bytes(vision: VisionEncoder, item: PictureItem, group: int = 1) -> int:
    """An upper bound of the memory that an item needs while it is encoded, in bytes. `group`: frames of a patch."""
    widest = max(sum(layer.parts) for layer in vision.modules() if isinstance(layer, Linear))
    patches = -(-pixels_of(item) // (vision.patch_area * group))
    # The pixels are held as they are, normalized, and in patches.
    return (3 * item.pixels.size + patches * widest * _VALUES) * torch.float32.itemsize


def _audio_bytes(vision: VisionEncoder, audio: AudioInfo) -> int:
    """An upper bound of the memory that the longest item of audio needs while it is encoded, in bytes."""
    parts = [part for module in vision.audio_modules for part in module.modules()]
    channels = [part.out_channels for part in parts if isinstance(part, torch.nn.Conv2d)]
    widest = max(sum(layer.parts) for layer in parts if isinstance(layer, Linear))
    # Convolutions halve columns and rows; their results are held before and after norms.
    stem = max(channels, default=0) * audio.num_mel_bins * audio.item_columns // 4
    layers = audio.item_columns // 4 * widest
    return (max(stem, layers) * _VALUES + audio.num_mel_bins * audio.item_columns) * torch.float32.itemsize


def pixel_cost(loaded: LoadedModel) -> float:
    """See `SchedulerLimits`. Weights are what takes time: those of the tower for a patch, the others for a token."""
    vision = vision_of(loaded)
    if vision is None:
        return 0.0
    tower = bytes_of(vision) - sum(map(bytes_of, vision.audio_modules))
    return tower / max(1, loaded.weight_bytes - tower) / vision.patch_area


def vision_of(loaded: LoadedModel) -> VisionEncoder | None:
    """The encoder of a model's pictures; None if it reads none."""
    return loaded.model.vision if isinstance(loaded.model, Decoder) else None


def _token_limit(loaded: LoadedModel, options: EngineOptions) -> int:
    return min(loaded.context_len, cached_embeddings(loaded, options))

"""Gemma 4: a tower whose patches are pooled, or, in the unified models, a projection of larger patches.

In larger models the tokens of a picture attend to each other in both directions: in layers with a window, or in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo, TokenBudget, VideoInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.video_processor import VideoProcessor, video_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gemma4_audio import CONFORMER, FRAMES
from quire.engine.models.families.vision_language import language_model, vision_language_model
from quire.engine.models.family import AudioTower, PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, Layer
from quire.engine.models.specs.shared_keys import SharedKeysAttention

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>(?:vision_tower|embed_vision)\..*)")
_MERGED = re.compile(r"(?:model\.)?(?:vision_embedder|embed_vision)\.(?:multimodal_embedder\.)?(?P<name>.*)")
_PROJECTION = "embedding_projection."


def _module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to another part."""
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def _merged_name(name: str) -> str | None:
    """The same of the unified models, by the names of published checkpoints or those of transformers."""
    match = _MERGED.fullmatch(name)
    if match is None:
        return None
    part = "multimodal_embedder." if match["name"].startswith(_PROJECTION) else ""
    return f"embed_vision.{part}{match['name']}"


def _patches(pixels: Tensor, edge: int) -> tuple[Tensor, Tensor]:
    """The patches (1, patches, size) of one image, row by row, and their places (1, patches, 2): column and row.

    `edge`: of a patch, in pixels.
    """
    import torch  # noqa: PLC0415 families are read without it

    _, colors, height, width = pixels.shape
    rows, columns = height // edge, width // edge
    squares = pixels.reshape(colors, rows, edge, columns, edge).permute(1, 3, 2, 4, 0)
    down, across = torch.meshgrid(
        torch.arange(rows, device=pixels.device), torch.arange(columns, device=pixels.device), indexing="ij"
    )
    return squares.reshape(1, rows * columns, -1), torch.stack((across, down), -1).reshape(1, -1, 2)


# transformers' embedders look at the weights of linear layers, which are packed here: their parts are called.


def _encode_pooled(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    vision, tower = model.config.vision_config, model.vision_tower
    patches, places = _patches(pixels, vision.patch_size)
    is_padding = patches.new_zeros(patches.shape[:2]).bool()
    embedder = tower.patch_embedder
    values = (2 * (patches - 0.5)).to(embedder.position_embedding_table.dtype)
    x = embedder.input_proj(values) + embedder._position_embeddings(places, is_padding)
    encoded = tower.encoder(inputs_embeds=x, attention_mask=None, pixel_position_ids=places).last_hidden_state
    tokens = patches.shape[1] // vision.pooling_kernel_size**2
    pooled, _mask = tower.pooler(encoded, places, is_padding, output_length=tokens)
    if vision.standardize:
        pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
    features: Tensor = model.embed_vision(inputs_embeds=pooled[0].to(x.dtype))
    return features


def _encode_merged(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    embedder = model.embed_vision
    patches, places = _patches(pixels, model.config.vision_config.model_patch_size)
    table = embedder.pos_embedding
    projected = embedder.patch_ln2(embedder.patch_dense(embedder.patch_ln1(patches.to(table.dtype))))
    across, down = places[0].unbind(-1)
    placed = embedder.pos_norm(projected + (table[across, 0] + table[down, 1]))
    last = embedder.multimodal_embedder
    features: Tensor = last.embedding_projection(last.embedding_pre_projection_norm(placed))[0]
    return features


def _facts(most_tokens: Callable[[Any], int], folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    """See `Tower.facts`. `most_tokens`: those of a picture that the config of a model allows."""
    if config.vision_config is None:
        raise UnsupportedModel("config.json has no vision_config")
    processor = ImageProcessor.read(folder, "gemma4")
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_id")
    normalization = processor.normalization()
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<|image|>"),
        geometry=_geometry(processor, config, most_tokens),
        before=text_of(folder, config.boi_token_id, "<|image>"),
        after=text_of(folder, config.eoi_token_id, "<image|>"),
        bidirectional=config.text_config.use_bidirectional_attention == "vision",
        video=video_of(folder, normalization, partial(_video, most_tokens, folder, config, spec.vocab)),
    )
    return PictureFacts(info=info, normalization=normalization)


def _geometry(processor: ImageProcessor, config: Any, most_tokens: Callable[[Any], int]) -> TokenBudget:
    geometry, vision = processor.token_budget(most_tokens(config)), config.vision_config
    edge = vision.patch_size * vision.pooling_kernel_size
    if geometry.multiple != edge:
        raise UnsupportedModel(
            f"a token stands for {edge}x{edge} pixels in config.json, but for {geometry.multiple}x{geometry.multiple} "
            "in the config of the processor"
        )
    return geometry


def _video(
    most_tokens: Callable[[Any], int], folder: Path, config: Any, vocab: int
) -> tuple[VideoProcessor, VideoInfo]:
    """Each frame is a picture of fewer tokens, with its time in front."""
    processor = VideoProcessor.read(folder, "gemma4")
    token = check_placeholder(config.video_token_id, vocab, "video_token_id")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, token, "<|video|>"),
        geometry=_geometry(processor, config, most_tokens),
        sampling=processor.sampling(),
        text="gemma4",
        before=text_of(folder, config.boi_token_id, "<|image>"),
        after=text_of(folder, config.eoi_token_id, "<image|>"),
    )


def _most_pooled(config: Any) -> int:
    """The positions along an edge: a long picture is one token high."""
    vision = config.vision_config
    return int(vision.position_embedding_size // max(1, vision.pooling_kernel_size))


def _most_merged(config: Any) -> int:
    """The same of the unified models. A token sees all of its picture, so that may not be longer than a window."""
    text, positions = config.text_config, int(config.vision_config.mm_posemb_size)
    is_causal = text.use_bidirectional_attention != "vision" or "sliding_attention" not in text.layer_types
    return positions if is_causal else min(positions, int(text.sliding_window))


def _causal_without_window(config: Any, text: DecoderSpec) -> DecoderSpec:
    """The language model, of which only layers with a window let the tokens of a picture see later ones."""
    return replace(language_model(config, text), layers=tuple(map(_causal_layer, text.layers)))


def _causal_layer(layer: Layer) -> Layer:
    attn = layer.attn
    if isinstance(attn, GroupedQueryAttention | SharedKeysAttention) and attn.window is None:
        return replace(layer, attn=replace(attn, is_causal=True))
    return layer


def _tower(
    encode: Callable[[Any, Tensor, PictureItem], Tensor],
    most_tokens: Callable[[Any], int],
    module_name: Callable[[str], str | None],
    audio: AudioTower,
) -> Tower:
    return Tower(
        language_model="language_model",
        facts=partial(_facts, most_tokens),
        encode=encode,
        module_name=module_name,
        audio=audio,
    )


FAMILIES = (
    vision_language_model(
        "gemma4", _tower(_encode_pooled, _most_pooled, _module_name, CONFORMER), _causal_without_window
    ),
    vision_language_model("gemma4_unified", _tower(_encode_merged, _most_merged, _merged_name, FRAMES)),
)

"""Phi-4 Multimodal: a decoder that reads audio and pictures, with an adapter for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.client.pictures import PaddedTiles, PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.adapter import AdapterConfig, read_adapter
from quire.engine.models.config.feature_extractor import LONG_FRAMES, SAMPLE_RATE, check_extractor, read_extractor
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel, WeightMismatch
from quire.engine.models.family import Composite, Facts, PictureFacts, RawConfig, Tower
from quire.engine.models.specs.audio import Conv2dStem, Projector, TimeConv
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    ClippedBias,
    ConformerLayer,
    DecoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    LayerNormSpec,
)
from quire.engine.models.specs.tensor_names import KIND, NamedTensors, WeightNames, linear_weight, swap_halves

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_CHUNK = 500  # positions that attend to each other: longer audio is encoded in chunks
# What other values would change is not implemented, in part because transformers' implementation fails with them.
_FIXED = {
    "chunk_size": -1,
    "bias_symmetric": False,
    "depthwise_multiplier": 1,
    "downsample_rate": 1,
    "nemo_activation": "relu",
}
_LAYER = r"encoder\.encoders\.(?P<index>\d+)\."
_TO = "encoder.layers.{index}."
_RULES = (
    (r"encoder\.encoder_embedding\.global_mean", "encoder.stem.standard.mean"),
    (r"encoder\.encoder_embedding\.global_invstd", "encoder.stem.standard.factor"),
    (r"encoder\.embed\.conv\.0" + KIND, "encoder.stem.first.{kind}"),
    (r"encoder\.embed\.out" + KIND, "encoder.stem.linear.{kind}"),
    (r"encoder\.relative_attention_bias_layer\.bias_values\.weight", "encoder.relative_bias.weight"),
    (_LAYER + r"self_attn\.(?:linear_)?(?P<part>q|k|v)(?:_proj)?" + KIND, _TO + "attn.qkv.{kind}"),
    (_LAYER + r"self_attn\.(?:o_proj|linear_out)" + KIND, _TO + "attn.out.{kind}"),
    (_LAYER + r"layer_norm_att" + KIND, _TO + "attn_norm.{kind}"),
    (_LAYER + r"layer_norm" + KIND, _TO + "out_norm.{kind}"),
    (_LAYER + r"conv\.layer_norm" + KIND, _TO + "conv_norm.{kind}"),
    (_LAYER + r"conv\.glu\.ext_pw_conv_1d" + KIND, _TO + "conv.up.{kind}"),
    (_LAYER + r"conv\.dw_sep_conv_1d\.dw_conv" + KIND, _TO + "conv.over_time.{kind}"),
    (_LAYER + r"conv\.dw_sep_conv_1d\.pw_conv" + KIND, _TO + "conv.mix.{kind}"),
    (_LAYER + r"conv\.ext_pw_conv_1d" + KIND, _TO + "conv.down.{kind}"),
    (r"(?:up_proj_for_speech|audio_projection\.speech\.0)" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"(?:down_proj_for_speech|audio_projection\.speech\.2)" + KIND, "encoder.projector.linears.1.{kind}"),
    (r"(?:up_proj_for_vision_speech|audio_projection\.vision\.0)" + KIND, "encoder.picture_projector.linears.0.{kind}"),
    (
        r"(?:down_proj_for_vision_speech|audio_projection\.vision\.2)" + KIND,
        "encoder.picture_projector.linears.1.{kind}",
    ),
)
_IGNORED = r"lm_head\.weight|embed_tokens_extend\.image_embed\..*"
_PICTURES = re.compile(r"(?:model\.)?(?P<name>embed_tokens_extend\.image_embed\..*)")
_POOLED = re.compile(r".*\.img_processor\.(?:head\..*|post_layernorm\..*|embeddings\.position_ids)")
# Of the part that reads pictures: the name that transformers has, by the authors'.
_PUBLISHED_PICTURES = {
    "glb_GN": "global_img_feature_extensor",
    "sub_GN": "sub_img_feature_extensor",
    "img_projection.0.": "img_projection_up.",
    "img_projection.2.": "img_projection_down.",
}
_GLU = re.compile(r"(?P<glu>.*\.conv\.glu)\.(?P<kind>b1|b2|ext_pw_conv_1d\.bias)")
# Of the encoder of audio in configs with code of their own: the name that transformers has, by the authors'.
_PUBLISHED_AUDIO = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
_PUBLISHED_SAME = (
    *("num_blocks", "activation", "chunk_size", "left_chunk", "dropout_rate", "ext_pw_out_channel", "kernel_size"),
    *("depthwise_multiplier", "conv_activation", "input_size", "conv_glu_type", "time_reduction"),
)
_PUBLISHED_DROPPED = (
    "auto_map",
    "audio_processor",
    "embd_layer",
    "img_processor",
    "_attn_implementation",
)


def phi4_multimodal(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Phi-4 Multimodal: a conformer with causal convolutions and biases of attention by distance.

    Raises:
        UnsupportedModel: an option of the encoder is not supported, or sizes do not match.
    """
    audio = config.audio_config
    for name, value in _FIXED.items():
        if getattr(audio, name) != value:
            raise UnsupportedModel(f"audio_config: {name} is {getattr(audio, name)!r}; supported is {value!r}")
    hidden, heads, reduction = audio.hidden_size, audio.num_attention_heads, audio.time_reduction
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if getattr(audio, name) != hidden:
            raise UnsupportedModel(f"audio_config: {name} is {getattr(audio, name)}, not hidden_size, {hidden}")
    if type(reduction) is not int or reduction < 2 or reduction & (reduction - 1):
        raise UnsupportedModel(f"audio_config: time_reduction is {reduction!r}, not a power of 2")
    if hidden % heads:
        raise UnsupportedModel(f"audio_config: a hidden size of {hidden} cannot be split into {heads} heads")
    dim = hidden // heads
    layer = ConformerLayer(
        attn=GroupedQueryAttention(
            heads=heads,
            kv_heads=heads,
            head_dim=dim,
            scale=dim**-0.5,
            rope=None,
            qkv_bias=True,
            out_bias=True,
            relative_bias=ClippedBias(reach=audio.bias_max_distance),
        ),
        ffn=GatedMLP(size=audio.intermediate_size, act=audio.activation, bias=True),
        conv=TimeConv(
            size=hidden,
            kernel=audio.kernel_size,
            act=audio.conv_activation,
            gate=audio.conv_glu_type,
            causal=True,
            mixes=True,
        ),
    )
    encoder = AudioEncoderSpec(
        stem=Conv2dStem(
            bands=audio.input_size,
            channels=audio.nemo_conv_channels,
            layers=reduction.bit_length() - 1,
            standardized=True,
        ),
        positions=None,
        hidden=hidden,
        layers=(layer,) * audio.num_blocks,
        norm=LayerNormSpec(eps=1e-5),
        max_positions=_CHUNK,
        final_norm=False,
        chunk=_CHUNK,
        projector=Projector(sizes=(text.hidden, text.hidden), bias=True),
        picture_projector=True,
    )
    return replace(text, encoder=encoder)


def _names(spec: DecoderSpec, text: WeightNames) -> WeightNames:
    """How checkpoints name their tensors, as transformers and as the authors have written them."""
    assert spec.encoder is not None
    encoder = spec.encoder
    convert: dict[str, Callable[[Tensor], Tensor]] = dict(text.convert)
    for index, layer in enumerate(encoder.layers):
        assert isinstance(layer, ConformerLayer)
        to = f"encoder.layers.{index}."
        gates_first = layer.conv.gate != "sigmoid"
        convert |= {f"{to}ffn{ffn}.gate_up.{kind}": swap_halves for ffn in (1, 2) for kind in ("weight", "bias")}
        convert |= {f"{to}conv.{name}.weight": linear_weight for name in ("mix", "down")}
        convert[f"{to}conv.up.weight"] = _gates_first if gates_first else linear_weight
        if gates_first:
            convert[f"{to}conv.up.bias"] = swap_halves
    return replace(
        text,
        rules=(*text.rules, *_RULES, *_feed_forwards(), *_subsampling(encoder)),
        prefixes=r"(?:model\.)?embed_tokens_extend\.audio_embed\.|model\.",
        ignored=rf"{text.ignored}|{_IGNORED}",
        convert=convert,
        prepare=_join_biases,
    )


def _feed_forwards() -> Iterator[tuple[str, str]]:
    for number, side in ((1, "in"), (2, "out")):
        ffn = _LAYER + rf"feed_forward_{side}\."
        yield ffn + "layer_norm" + KIND, _TO + f"ffn{number}_norm." + "{kind}"
        yield ffn + r"(?:gate_up_proj|net\.0\.linear)" + KIND, _TO + f"ffn{number}.gate_up." + "{kind}"
        yield ffn + r"(?:down_proj|net\.2)" + KIND, _TO + f"ffn{number}.down." + "{kind}"


def _subsampling(encoder: AudioEncoderSpec) -> Iterator[tuple[str, str]]:
    """The names of a convolution, an activation, then two convolutions and an activation for each further layer."""
    for index in range(len(encoder.stem.convolutions) - 1):
        for name, place in (("channelwise", 2 + 3 * index), ("pointwise", 3 + 3 * index)):
            yield rf"encoder\.embed\.conv\.{place}" + KIND, f"encoder.stem.{name}.{index}." + "{kind}"


def _gates_first(weight: Tensor) -> Tensor:
    return swap_halves(linear_weight(weight))


def _join_biases(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the biases of a convolution, of its values and of its gates added up."""
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _GLU.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = held.setdefault(match["glu"], {})
        parts[match["kind"]] = tensor.clone()  # it is valid until the next one is read
        if len(parts) == 3:
            bias = parts.pop("ext_pw_conv_1d.bias")
            values, gates = parts["b1"].flatten(), parts["b2"].flatten()
            if bias.shape != (len(values) + len(gates),):
                raise WeightMismatch(
                    f"{match['glu']} has biases of {len(bias)} and of {len(values) + len(gates)} elements"
                )
            summed = bias.float()
            summed[: len(values)] += values.float()
            summed[len(values) :] += gates.float()
            yield f"{match['glu']}.ext_pw_conv_1d.bias", summed
            del held[match["glu"]]
    for glu, parts in held.items():
        raise WeightMismatch(f"{glu} has {', '.join(sorted(parts))} only, of b1, b2 and ext_pw_conv_1d.bias")


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    """Read the audio's config. Audio longer than a chunk is several items; convolutions read across borders."""
    encoder = spec.encoder
    assert encoder is not None
    stem = encoder.stem
    assert isinstance(stem, Conv2dStem)
    rate = 1 << stem.layers
    fixed = {"preemphasis": 0.97, "audio_compression_rate": rate, "audio_downsample_rate": 1, "audio_feat_stride": 1}
    bands = {"mel_min_frequency": 0, "mel_max_frequency": 7690, "feature_size": stem.bands}
    check_extractor(read_extractor(folder), {**LONG_FRAMES, **fixed, **bands})
    placeholder = check_placeholder(config.audio_config.audio_token_id, spec.vocab)
    columns = encoder.chunk * rate
    audio = AudioInfo(
        kind="phi4_multimodal",
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder),
        sample_rate=SAMPLE_RATE,
        features="kaldi_log_mel",
        num_mel_bins=stem.bands,
        item_columns=columns,
        lengths=AudioLengths(columns, stem.layers, 1),
        columns_before=rate,
    )
    return Facts(
        audio=audio, adapter=_adapter(folder, config, "speech"), picture_adapter=_adapter(folder, config, "vision")
    )


def _adapter(folder: Path, config: Any, name: str) -> AdapterConfig | None:
    """Read the config of the adapter with which the model computes requests with audio or pictures.

    Returns:
        The config; None if the model has no adapter of that name.

    Raises:
        ModelError: see `read_adapter`.
    """
    inside = getattr(config, f"{name}_lora", None)  # as its authors have published it
    if inside is None:
        return read_adapter(folder, f"{name}-lora")
    alpha = inside.get("lora_alpha") if isinstance(inside, dict) else None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise BrokenFolder(f"config.json: {name}_lora must be an object with a number lora_alpha, not {inside!r}")
    return AdapterConfig(file=None, name=name, alpha=float(alpha))


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if pictures do not need it."""
    match = _PICTURES.fullmatch(name)
    if match is None or _POOLED.fullmatch(name):
        return None
    inner = match["name"]
    for published, known in _PUBLISHED_PICTURES.items():
        inner = inner.replace(f".image_embed.{published}", f".image_embed.{known}")
    return inner


def _pictures(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    """Read how the model reads pictures.

    Raises:
        UnsupportedModel: the folder does not say so, or the tower does not fit to it.
    """
    vision, processor = config.vision_config, ImageProcessor.read(folder, "phi4multimodal")
    geometry = processor.padded_tiles()
    sizes = (geometry.tile, geometry.tile, geometry.tile // geometry.patches)
    if (vision.image_size, vision.crop_size, vision.patch_size) != sizes:
        raise UnsupportedModel(
            f"vision_config: image_size, crop_size and patch_size are {vision.image_size}, {vision.crop_size} and "
            f"{vision.patch_size}, but the image processor makes tiles of {sizes[0]} pixels and patches of {sizes[2]}"
        )
    if not 0 < _depth(vision) <= vision.num_hidden_layers:
        raise UnsupportedModel(
            f"vision_config: feature_layer is {vision.feature_layer!r}, which the tower does not have"
        )
    token = check_placeholder(vision.image_token_id, spec.vocab, "image_token_id")
    info = PictureInfo(placeholder=token, placeholder_text=text_of(folder, token), geometry=geometry)
    return PictureFacts(info=info, normalization=processor.normalization())


def _depth(vision: Any) -> int:
    """The number of layers whose output is read."""
    layer: int = vision.feature_layer
    return layer if layer >= 0 else vision.num_hidden_layers + 1 + layer


def _encode(model: Any, pixels: Tensor, item: PictureItem) -> Tensor:
    """The rows of the picture, then those of an image of the whole of it. Each ends with a learned embedding."""
    import torch  # noqa: PLC0415 families are read without it
    import torch.nn.functional as F  # noqa: PLC0415

    assert item.original_size is not None
    part, tile = model.embed_tokens_extend.image_embed, pixels.shape[-1]
    padded = PaddedTiles(tile=tile, patches=tile // model.config.vision_config.patch_size, max_tiles=len(pixels))
    down, across = _grid(len(pixels), tile, item.original_size)
    rows, columns = padded.covered(down, item.original_size[0]), padded.covered(across, item.original_size[1])
    canvas = pixels.view(down, across, 3, tile, tile).permute(2, 0, 3, 1, 4).reshape(1, 3, down * tile, across * tile)
    whole = F.interpolate(canvas.float(), (tile, tile), mode="bicubic", align_corners=False).to(pixels.dtype)
    edge = torch.arange(padded.patches, device=pixels.device)
    inside = [(edge < row)[:, None] & (edge < column) for row in rows for column in columns]
    features = _features(part, torch.cat([whole, pixels]), torch.stack([torch.ones_like(inside[0]), *inside]))
    grid = features[1:].unflatten(0, (down, across)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    covered = grid[: sum(-(-row // 2) for row in rows), : sum(-(-column // 2) for column in columns)]
    row_end, separator = part.sub_img_feature_extensor[0], part.global_img_feature_extensor[0]

    def lines(embeddings: Tensor) -> Tensor:
        return torch.cat([embeddings, row_end.expand(len(embeddings), 1, -1)], 1).flatten(0, 1)

    joined = torch.cat([lines(covered), separator, lines(features[0])])
    projected: Tensor = part.img_projection_down(F.gelu(part.img_projection_up(joined)))
    return projected


def _grid(tiles: int, tile: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the tiles of a picture, which covers a part of each of them."""
    rows, columns = (-(-edge // tile) for edge in size)
    if rows * columns < tiles:  # all of the last ones are padding, as its edge was rounded down
        return (rows, columns + 1) if rows * (columns + 1) == tiles else (rows + 1, columns)
    return rows, columns


def _features(part: Any, images: Tensor, mask: Tensor) -> Tensor:
    """Encode images: (images, rows, columns, size), each for a square of four patches.

    `mask`: (images, rows, columns) of patches that are no padding.
    """
    from transformers.masking_utils import create_bidirectional_mask  # noqa: PLC0415 as torch

    vision = part.img_processor
    x = vision.embeddings(pixel_values=images, patch_attention_mask=mask)
    attention_mask = create_bidirectional_mask(config=vision.config, inputs_embeds=x, attention_mask=mask.flatten(1))
    for layer in vision.encoder.layers[: _depth(vision.config)]:
        x = layer(x, attention_mask)
    x = x.unflatten(1, mask.shape[1:]).permute(0, 3, 1, 2)
    if mask.shape[1] % 2:
        x = part.img_processor_padding(x)
    features: Tensor = part.image_token_compression(x).permute(0, 2, 3, 1)
    return features


def _language_model(config: Any) -> tuple[str, Any]:
    """Phi-3, whose config is that of the whole model."""
    return "phi3", config


def _published(raw: RawConfig) -> RawConfig:
    """The config of Phi-4 Multimodal as its authors have published it."""
    known = {name: value for name, value in raw.items() if name not in _PUBLISHED_DROPPED}
    audio_config = _object(_object(raw, "audio_processor"), "config")
    audio = {name: audio_config[name] for name in _PUBLISHED_SAME if name in audio_config}
    audio |= {
        name: audio_config[published] for published, name in _PUBLISHED_AUDIO.items() if published in audio_config
    }
    if (channels := _object(audio_config, "nemo_conv_settings").get("conv_channels")) is not None:
        audio["nemo_conv_channels"] = channels
    if (distance := _object(audio_config, "relative_attention_bias_args").get("t5_bias_max_distance")) is not None:
        audio["bias_max_distance"] = distance
    rate = _object(_object(raw, "embd_layer"), "audio_embd_layer").get("downsample_rate")
    if rate is not None:
        audio["downsample_rate"] = rate
    names = ["Phi4MultimodalForCausalLM"]
    return {**known, "model_type": "phi4_multimodal", "architectures": names, "audio_config": audio}


def _object(section: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = section.get(name) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{name} must be an object, not {value!r}")
    return value


FAMILIES = (
    Composite(
        name="phi4_multimodal",
        config_types=("phi4_multimodal",),
        language_model=_language_model,
        spec=phi4_multimodal,
        tensors=_names,
        facts=_facts,
        has_adapter=True,
        tower=Tower(
            language_model="layers",
            facts=_pictures,
            encode=_encode,
            module_name=module_name,
            unused=(
                *("embed_tokens", "norm", "rotary_emb", "embed_tokens_extend.audio_embed"),
                *(f"embed_tokens_extend.image_embed.img_processor.{name}" for name in ("head", "post_layernorm")),
            ),
        ),
        published={"phi4mm": _published},
    ),
)

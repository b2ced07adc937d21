"""wav2vec 2.0 and HuBERT, which transcribe by connectionist temporal classification (CTC)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.engine.client.convolutions import count_positions
from quire.engine.client.model_info import Transcribes
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, WINDOW_SECONDS, read_speech_extractor
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import ConvPositions, StemNorm, WaveConv, WaveStem
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CTCSpec,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.engine.models.specs.tensor_names import KIND, NamedTensors, WeightNames, linear_weight

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_TO = "encoder.layers.{index}."
_ENCODER = r"encoder\.layers\.(?P<index>\d+)\."
_WAVE = (
    (r"feature_extractor\.conv_layers\.(?P<conv>\d+)\.conv" + KIND, "encoder.stem.convs.{conv}.linear.{kind}"),
    (r"feature_extractor\.conv_layers\.(?P<conv>\d+)\.layer_norm" + KIND, "encoder.stem.convs.{conv}.norm.{kind}"),
    (r"feature_projection\.layer_norm" + KIND, "encoder.stem.norm.{kind}"),
    (r"feature_projection\.projection" + KIND, "encoder.stem.projection.{kind}"),
    (
        r"encoder\.pos_conv_embed\.conv\.groups\.(?P<group>\d+)" + KIND,
        "encoder.positions.groups.{group}.{kind}",
    ),
    (_ENCODER + r"attention\.(?P<part>q|k|v)_proj" + KIND, _TO + "attn.qkv.{kind}"),
    (_ENCODER + r"attention\.out_proj" + KIND, _TO + "attn.out.{kind}"),
    (_ENCODER + r"feed_forward\.intermediate_dense" + KIND, _TO + "ffn.up.{kind}"),
    (_ENCODER + r"feed_forward\.output_dense" + KIND, _TO + "ffn.down.{kind}"),
    (r"lm_head" + KIND, "head.{kind}"),
)
_NORMS_AFTER = (
    (r"encoder\.layer_norm" + KIND, "encoder.positions_norm.{kind}"),
    (_ENCODER + r"layer_norm" + KIND, _TO + "attn_post_ln.{kind}"),
    (_ENCODER + r"final_layer_norm" + KIND, _TO + "ffn_post_ln.{kind}"),
)
_NORMS_BEFORE = (
    (r"encoder\.layer_norm" + KIND, "encoder.norm.{kind}"),
    (_ENCODER + r"layer_norm" + KIND, _TO + "attn_norm.{kind}"),
    (_ENCODER + r"final_layer_norm" + KIND, _TO + "ffn_norm.{kind}"),
)
_WEIGHT_NORM = re.compile(
    r"(?P<conv>.*pos_conv_embed\.conv)\.(?:weight_(?P<old>[gv])|parametrizations\.weight\.original(?P<new>[01])"
    r"|(?P<plain>weight|bias))"
)


def wav2vec2(config: Any) -> CTCSpec:
    """wav2vec 2.0: convolutions over samples, a convolution for positions, norms after the sums or before the branches.

    Raises:
        UnsupportedModel: it has an adapter.
    """
    if getattr(config, "add_adapter", False):
        raise UnsupportedModel("wav2vec2 with add_adapter is not supported")
    if getattr(config, "adapter_attn_dim", None) is not None:
        raise UnsupportedModel("wav2vec2 with an adapter for each language (adapter_attn_dim) is not supported")
    return _wave_model(config, projection_norm=True)


def hubert(config: Any) -> CTCSpec:
    """HuBERT: wav2vec 2.0, perhaps without the norm before the projection.

    Raises:
        UnsupportedModel: positions have a batch norm.
    """
    if config.conv_pos_batch_norm:
        raise UnsupportedModel("hubert with conv_pos_batch_norm is not supported")
    return _wave_model(config, projection_norm=config.feat_proj_layer_norm)


def _wave_model(config: Any, *, projection_norm: bool) -> CTCSpec:
    hidden, heads, stable = config.hidden_size, config.num_attention_heads, config.do_stable_layer_norm
    dim = hidden // heads
    if dim * heads != hidden or hidden % config.num_conv_pos_embedding_groups:
        groups = config.num_conv_pos_embedding_groups
        raise UnsupportedModel(f"a hidden size of {hidden} cannot be split into {heads} heads and {groups} groups")
    layer = Layer(
        attn=GroupedQueryAttention(
            heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True
        ),
        ffn=PlainMLP(size=config.intermediate_size, act=config.hidden_act),
        pre_norm=stable,
        post_ln=not stable,
    )
    stem = WaveStem(
        convs=_convs(config), projection=True, projection_norm=config.layer_norm_eps if projection_norm else None
    )
    positions = ConvPositions(
        kernel=config.num_conv_pos_embeddings,
        groups=config.num_conv_pos_embedding_groups,
        act=config.feat_extract_activation,
        norm=not stable,
    )
    return CTCSpec(
        encoder=AudioEncoderSpec(
            stem=stem,
            positions=positions,
            hidden=hidden,
            layers=(layer,) * config.num_hidden_layers,
            norm=LayerNormSpec(eps=config.layer_norm_eps),
            max_positions=count_positions(stem.convolutions, round(WINDOW_SECONDS * SAMPLE_RATE)),
            final_norm=stable,
        ),
        vocab=config.vocab_size,
    )


def _convs(config: Any) -> tuple[WaveConv, ...]:
    if config.feat_extract_norm not in ("group", "layer"):
        raise UnsupportedModel(f"feat_extract_norm must be group or layer, not {config.feat_extract_norm!r}")
    for name in ("conv_dim", "conv_kernel", "conv_stride"):
        if not all(type(value) is int and value > 0 for value in getattr(config, name)):
            raise UnsupportedModel(f"{name} must be a list of positive integers")
    by_position = config.feat_extract_norm == "layer"
    sizes = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
    return tuple(
        WaveConv(
            size=size,
            kernel=kernel,
            stride=stride,
            act=config.feat_extract_activation,
            bias=config.conv_bias,
            norm=StemNorm.POSITION if by_position else StemNorm.CHANNEL if index == 0 else None,
        )
        for index, (size, kernel, stride) in enumerate(sizes)
    )


def _names(spec: CTCSpec, _facts: Facts) -> WeightNames:
    encoder = spec.encoder
    assert isinstance(encoder.stem, WaveStem)
    weights = [f"encoder.stem.convs.{index}.linear.weight" for index in range(len(encoder.stem.convs))]
    groups = encoder.positions.groups if isinstance(encoder.positions, ConvPositions) else 1
    return WeightNames(
        (*_WAVE, *(_NORMS_BEFORE if encoder.final_norm else _NORMS_AFTER)),
        prefixes=r"(?:wav2vec2|hubert)\.",
        ignored=r"masked_spec_embed",
        convert=dict.fromkeys(weights, linear_weight),
        prepare=partial(_split_positions, groups),
    )


def _split_positions(groups: int, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the groups of the convolution for positions apart, as weights of linear layers.

    The norm of each of its taps may be a tensor of its own (weight normalization).
    """
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match = _WEIGHT_NORM.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        conv, kind = match["conv"], match["old"] or match["new"]
        if kind is not None:
            held["norm" if kind in "g0" else "direction"] = tensor.clone()  # it is valid until the next one is read
            if len(held) < 2:
                continue
            direction = held["direction"].float()
            if direction.dim() != 3:
                raise WeightMismatch(f"{name}: the weight of a convolution has 3 dimensions, not {direction.dim()}")
            tensor = direction * (held["norm"].float() / direction.norm(dim=(0, 1), keepdim=True))
        suffix = "bias" if match["plain"] == "bias" else "weight"
        for group, part in enumerate(tensor.chunk(groups)):
            yield f"{conv}.groups.{group}.{suffix}", linear_weight(part) if suffix == "weight" else part


def ctc_facts(
    config: Any,
    spec: CTCSpec,
    features: Literal["samples", "normalized_samples", "normalized_log_mel"],
    *,
    rows: int = 1,
    hop: int = 1,
) -> Facts:
    """Facts about a CTC model.

    Args:
        config: the model's Hugging Face config.
        spec: its architecture.
        features: what the encoder reads.
        rows: rows of a column of features.
        hop: samples from one column to the next.

    Raises:
        UnsupportedModel: it has no blank token.
    """
    stem, encoder = spec.encoder.stem, spec.encoder
    stride = math.prod(convolution.stride for convolution in stem.convolutions)
    blank = config.pad_token_id
    if type(blank) is not int or not 0 <= blank < spec.vocab:
        raise UnsupportedModel(f"pad_token_id, the blank of CTC, is {blank!r}, which is not a token of the vocabulary")
    info = Transcribes(
        kind="ctc",
        features=features,
        sample_rate=SAMPLE_RATE,
        num_mel_bins=rows,
        num_columns=round(WINDOW_SECONDS * SAMPLE_RATE) // hop,
        convolutions=stem.convolutions,
        window_seconds=WINDOW_SECONDS,
        num_positions=encoder.max_positions,
        max_output_tokens=encoder.max_positions,
        blank_token=blank,
        aligns_words=True,
        time_precision=stride * hop / SAMPLE_RATE,
    )
    return Facts(speech=SpeechToTextSpec(info=info))


def _facts(folder: Path, config: Any, spec: CTCSpec) -> Facts:
    normalized = read_speech_extractor(folder).get("do_normalize", True) is not False
    return ctc_facts(config, spec, "normalized_samples" if normalized else "samples")


FAMILIES = tuple(
    Family(name=name, config_types=(name,), kind="ctc", spec=spec, tensors=_names, facts=_facts, head="CTC")
    for name, spec in (("hubert", hubert), ("wav2vec2", wav2vec2))
)

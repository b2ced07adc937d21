"""Granite Speech, and Granite Speech Plus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.audio import AudioInfo, WindowLengths
from quire.engine.models.config.adapter import read_adapter
from quire.engine.models.config.feature_extractor import LONG_FRAMES, SAMPLE_RATE, check_extractor, read_extractor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import Composite, Facts, text_config
from quire.engine.models.specs.audio import BlockAttention, LinearStem, QueryProjector, TimeConv
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, DecoderSpec, LayerNormSpec, PlainMLP
from quire.engine.models.specs.tensor_names import KIND, NamedTensors, WeightNames, linear_weight

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_COLUMNS_PER_SECOND = 50  # two frames of a spectrogram are a column
_LONGEST = 300  # seconds of an item: its positions depend on each other, so it is encoded at once
_MAX_POSITIONS = _LONGEST * _COLUMNS_PER_SECOND
_LAYER = r"encoder\.layers\.(?P<index>\d+)\."
_TO = "encoder.layers.{index}."
_QUERIES = r"projector\.qformer\.encoder\.layer\.(?P<index>\d+)\."
_QUERIES_TO = "encoder.projector.layers.{index}."
_RULES = (
    (r"encoder\.input_linear" + KIND, "encoder.stem.linear.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.pre_norm" + KIND, _TO + "ffn{ffn}_norm.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.up_proj" + KIND, _TO + "ffn{ffn}.up.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.down_proj" + KIND, _TO + "ffn{ffn}.down.{kind}"),
    (_LAYER + r"attn\.pre_norm" + KIND, _TO + "attn_norm.{kind}"),
    (_LAYER + r"attn\.to_(?P<part>q|k|v)\.weight", _TO + "attn.qkv.weight"),
    (_LAYER + r"attn\.to_out" + KIND, _TO + "attn.out.{kind}"),
    (_LAYER + r"attn\.rel_pos_emb\.weight", _TO + "attn.distances"),
    (_LAYER + r"conv\.norm" + KIND, _TO + "conv_norm.{kind}"),
    (_LAYER + r"conv\.(?P<side>up|down)_conv" + KIND, _TO + "conv.{side}.{kind}"),
    (_LAYER + r"conv\.depth_conv\.conv\.weight", _TO + "conv.over_time.weight"),
    (_LAYER + r"conv\.batch_norm" + KIND, _TO + "conv.norm.{kind}"),
    (_LAYER + r"conv\.batch_norm\.running_mean", _TO + "conv.norm.mean"),
    (_LAYER + r"conv\.batch_norm\.running_var", _TO + "conv.norm.variance"),
    (_LAYER + r"post_norm" + KIND, _TO + "out_norm.{kind}"),
    (r"projector\.query", "encoder.projector.query"),
    (r"projector\.linear" + KIND, "encoder.projector.linear.{kind}"),
    (r"projector\.qformer\.layernorm" + KIND, "encoder.projector.norm.{kind}"),
    (_QUERIES + r"attention\.attention\.(?P<side>query|key|value)" + KIND, _QUERIES_TO + "attn.{side}.{kind}"),
    (_QUERIES + r"attention\.output\.dense" + KIND, _QUERIES_TO + "attn.out.{kind}"),
    (_QUERIES + r"attention\.output\.LayerNorm" + KIND, _QUERIES_TO + "attn_norm.{kind}"),
    (_QUERIES + r"crossattention\.attention\.(?P<side>query|key|value)" + KIND, _QUERIES_TO + "cross.{side}.{kind}"),
    (_QUERIES + r"crossattention\.output\.dense" + KIND, _QUERIES_TO + "cross.out.{kind}"),
    (_QUERIES + r"crossattention\.output\.LayerNorm" + KIND, _QUERIES_TO + "cross_norm.{kind}"),
    (_QUERIES + r"intermediate_query\.dense" + KIND, _QUERIES_TO + "ffn.up.{kind}"),
    (_QUERIES + r"output_query\.dense" + KIND, _QUERIES_TO + "ffn.down.{kind}"),
    (_QUERIES + r"output_query\.LayerNorm" + KIND, _QUERIES_TO + "ffn_norm.{kind}"),
)
_KEYS_AND_VALUES = "attn.to_kv.weight"


def granite_speech(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Granite Speech: a conformer that attends within blocks, and queries for each window of its positions.

    In Granite Speech Plus these read the outputs of some layers beside the last one's.

    Raises:
        UnsupportedModel: sizes do not match, or the projector is of another kind.
    """
    audio = config.encoder_config
    if not 0 < audio.context_size <= audio.max_pos_emb:
        raise UnsupportedModel(f"context_size is {audio.context_size}, not from 1 to max_pos_emb, {audio.max_pos_emb}")
    layer = ConformerLayer(
        attn=BlockAttention(
            heads=audio.num_heads,
            head_dim=audio.dim_head,
            scale=audio.dim_head**-0.5,
            block=audio.context_size,
            reach=audio.max_pos_emb,
        ),
        ffn=PlainMLP(size=audio.hidden_dim * audio.feedforward_mult, act="silu"),
        conv=TimeConv(
            size=audio.hidden_dim * audio.conv_expansion_factor,
            kernel=audio.conv_kernel_size,
            act="silu",
            kernel_bias=False,
        ),
    )
    layers = [layer] * audio.num_layers
    if (middle := audio.num_layers // 2) > 0:
        layers[middle - 1] = replace(layer, feedback=audio.output_dim)
    concatenated = tuple(sorted(set(getattr(audio, "cat_hidden_layers", None) or ())))
    encoder = AudioEncoderSpec(
        stem=LinearStem(rows=audio.input_dim),
        positions=None,
        hidden=audio.hidden_dim,
        layers=tuple(layers),
        norm=LayerNormSpec(eps=1e-5),
        max_positions=_MAX_POSITIONS,
        final_norm=False,
        concatenated=concatenated,
        projector=_projector(config, text, audio.hidden_dim * (1 + len(concatenated))),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)


def _projector(config: Any, text: DecoderSpec, source: int) -> QueryProjector:
    projector = config.projector_config
    if projector.model_type != "blip_2_qformer":
        raise UnsupportedModel(f"projector_config is of type {projector.model_type!r}; supported is blip_2_qformer")
    if projector.use_qformer_text_input:
        raise UnsupportedModel("projector_config with use_qformer_text_input is not supported")
    if projector.encoder_hidden_size != source:
        raise UnsupportedModel(
            f"the projector reads {projector.encoder_hidden_size} elements of each position, but the encoder gives "
            f"{source}"
        )
    window, rate = config.window_size, config.downsample_rate
    if rate < 1 or window < 1 or window % rate:
        raise UnsupportedModel(f"window_size is {window}, not a multiple of downsample_rate, {rate}")
    if projector.num_attention_heads < 1 or projector.hidden_size % projector.num_attention_heads:
        raise UnsupportedModel(
            f"a hidden size of {projector.hidden_size} cannot be split into {projector.num_attention_heads} heads"
        )
    return QueryProjector(
        window=window,
        queries=window // rate,
        source=source,
        hidden=projector.hidden_size,
        layers=projector.num_hidden_layers,
        heads=projector.num_attention_heads,
        ffn=projector.intermediate_size,
        act=projector.hidden_act,
        eps=projector.layer_norm_eps,
        cross_every=projector.cross_attention_frequency,
        size=text.hidden,
    )


def _names(spec: DecoderSpec, text: WeightNames) -> WeightNames:
    assert spec.encoder is not None
    encoder = spec.encoder
    layers = range(len(encoder.layers))
    weights = [f"encoder.layers.{index}.conv.{name}.weight" for index in layers for name in ("up", "down")]
    feedback = [
        rule
        for index, layer in enumerate(encoder.layers)
        if isinstance(layer, ConformerLayer) and layer.feedback
        for rule in (
            (r"encoder\.out" + KIND, f"encoder.layers.{index}.feedback.classes." + "{kind}"),
            (r"encoder\.out_mid" + KIND, f"encoder.layers.{index}.feedback.back." + "{kind}"),
        )
    ]
    return replace(
        text,
        rules=(*text.rules, *_RULES, *feedback),
        # With and without the name of the model around all of it, as transformers has written them at different times.
        prefixes=rf"(?:model\.)?language_model\.(?:{text.prefixes})?|model\.(?=encoder\.|projector\.)",
        ignored=rf"{text.ignored}|lm_head\.weight|.*\.num_batches_tracked|encoder\.out(?:_mid)?{KIND}",
        convert={**text.convert, **dict.fromkeys(weights, linear_weight), "encoder.projector.query": _first},
        prepare=_split_keys,
    )


def _first(tensor: Tensor) -> Tensor:
    """(1, queries, hidden) without its first dimension."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _split_keys(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the fused projections of keys and values apart."""
    for name, tensor in tensors:
        if not name.endswith(_KEYS_AND_VALUES):
            yield name, tensor
            continue
        stem = name.removesuffix("kv.weight")
        keys, values = tensor.tensor_split(2)
        yield f"{stem}k.weight", keys
        yield f"{stem}v.weight", values


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    """Read the audio's config. The extractor does not read what its config calls melspec_kwargs."""
    encoder = spec.encoder
    assert encoder is not None
    stem, projector = encoder.stem, encoder.projector
    assert isinstance(stem, LinearStem)
    assert isinstance(projector, QueryProjector)
    if stem.rows % 2:
        raise UnsupportedModel(f"the encoder reads {stem.rows} rows of features, an odd number")
    window, queries = projector.window, projector.queries
    fixed = {"projector_window_size": window, "projector_downsample_rate": window // queries}
    rows = {"n_mels": stem.rows // 2, "feature_size": stem.rows // 2}
    check_extractor(read_extractor(folder), {**LONG_FRAMES, **fixed, **rows})
    placeholder = check_placeholder(config.audio_token_id, spec.vocab)
    audio = AudioInfo(
        kind="granite_speech",
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder),
        sample_rate=SAMPLE_RATE,
        features="stacked_log_mel",
        num_mel_bins=stem.rows,
        column_samples=SAMPLE_RATE // _COLUMNS_PER_SECOND,
        item_columns=encoder.max_positions,
        lengths=WindowLengths(window, queries),
        max_items=1,
    )
    return Facts(audio=audio, adapter=read_adapter(folder))


FAMILIES = (
    Composite(
        name="granite_speech",
        config_types=("granite_speech", "granite_speech_plus"),
        language_model=text_config,
        spec=granite_speech,
        tensors=_names,
        facts=_facts,
        has_adapter=True,
    ),
)

"""Moonshine: an encoder of samples and a decoder, both with rotary positions (Jeffries et al. 2024)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.client.convolutions import count_positions
from quire.engine.client.json_file import read_json
from quire.engine.client.model_info import Transcribes
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, WINDOW_SECONDS, read_speech_extractor
from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import StemNorm, WaveConv, WaveStem
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CrossAttention,
    DecoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight, swap_halves

_NORM = LayerNormSpec(eps=1e-5, bias=False)
_DECODER = r"decoder\.layers\.(?P<layer>\d+)\."
_ENCODER, _TO = r"encoder\.layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
_RULES = (
    (r"decoder\.embed_tokens\.weight", "embed.weight"),
    (_DECODER + r"self_attn\.(?P<part>q|k|v)_proj\.weight", "attn.qkv.weight"),
    (_DECODER + r"self_attn\.o_proj\.weight", "attn.out.weight"),
    (_DECODER + r"input_layernorm\.weight", "attn_norm.weight"),
    (_DECODER + r"encoder_attn\.(?P<side>q|k|v)_proj\.weight", "cross.{side}.weight"),
    (_DECODER + r"encoder_attn\.o_proj\.weight", "cross.out.weight"),
    (_DECODER + r"post_attention_layernorm\.weight", "cross_norm.weight"),
    (_DECODER + r"mlp\.fc1" + KIND, "ffn.gate_up.{kind}"),
    (_DECODER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
    (_DECODER + r"final_layernorm\.weight", "ffn_norm.weight"),
    (r"decoder\.norm\.weight", "norm.weight"),
    (r"proj_out\.weight", "head.weight"),
    (r"encoder\.conv1\.weight", "encoder.stem.convs.0.linear.weight"),
    (r"encoder\.conv2" + KIND, "encoder.stem.convs.1.linear.{kind}"),
    (r"encoder\.conv3" + KIND, "encoder.stem.convs.2.linear.{kind}"),
    (r"encoder\.groupnorm" + KIND, "encoder.stem.convs.0.norm.{kind}"),
    (_ENCODER + r"self_attn\.(?P<part>q|k|v)_proj\.weight", _TO + "attn.qkv.weight"),
    (_ENCODER + r"self_attn\.o_proj\.weight", _TO + "attn.out.weight"),
    (_ENCODER + r"input_layernorm\.weight", _TO + "attn_norm.weight"),
    (_ENCODER + r"post_attention_layernorm\.weight", _TO + "ffn_norm.weight"),
    (_ENCODER + r"mlp\.fc1" + KIND, _TO + "ffn.up.{kind}"),
    (_ENCODER + r"mlp\.fc2" + KIND, _TO + "ffn.down.{kind}"),
    (r"encoder\.layer_norm\.weight", "encoder.norm.weight"),
)
_NAMES = WeightNames(
    _RULES,
    ignored=r"proj_out\.weight",
    convert={
        **{f"encoder.stem.convs.{index}.linear.weight": linear_weight for index in range(3)},
        **dict.fromkeys(("ffn.gate_up.weight", "ffn.gate_up.bias"), swap_halves),
    },
)


def moonshine(config: Any) -> DecoderSpec:
    """Moonshine.

    Raises:
        UnsupportedModel: heads differ in number, or projections have biases.
    """
    hidden, heads = config.hidden_size, config.decoder_num_attention_heads
    counts = (config.encoder_num_attention_heads, config.encoder_num_key_value_heads)
    if any(count != heads for count in (*counts, config.decoder_num_key_value_heads)):
        raise UnsupportedModel("moonshine with different numbers of heads is not supported")
    if config.attention_bias:
        raise UnsupportedModel("moonshine with attention_bias is not supported")
    dim = getattr(config, "head_dim", None) or hidden // heads
    rope = rope_of(config, dim, interleaved=True, partial=True)
    attn = GroupedQueryAttention(heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=rope)
    layer = Layer(
        attn=attn,
        cross=CrossAttention(heads=heads, head_dim=dim, scale=dim**-0.5, bias=False),
        ffn=GatedMLP(size=config.intermediate_size, act=config.decoder_hidden_act, bias=True),
    )
    encoder_layer = Layer(
        attn=attn, ffn=PlainMLP(size=config.intermediate_size, act=config.encoder_hidden_act, bias=True)
    )
    stem = _stem(hidden)
    return DecoderSpec(
        hidden=hidden,
        vocab=config.vocab_size,
        layers=(layer,) * config.decoder_num_hidden_layers,
        norm=_NORM,
        max_positions=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        encoder=AudioEncoderSpec(
            stem=stem,
            positions=None,
            hidden=hidden,
            layers=(encoder_layer,) * config.encoder_num_hidden_layers,
            norm=_NORM,
            max_positions=count_positions(stem.convolutions, round(WINDOW_SECONDS * SAMPLE_RATE)),
        ),
    )


def _stem(hidden: int) -> WaveStem:
    first = WaveConv(size=hidden, kernel=127, stride=64, act="tanh", norm=StemNorm.ALL, norm_last=True)
    second = WaveConv(size=2 * hidden, kernel=7, stride=3, act="gelu", bias=True)
    return WaveStem(convs=(first, second, WaveConv(size=hidden, kernel=3, stride=2, act="gelu", bias=True)))


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    encoder = spec.encoder
    assert encoder is not None
    generation = read_json(folder / "generation_config.json", BrokenFolder)

    def token(key: str) -> int:
        token_id: Any = generation.get(key, getattr(config, key))
        if type(token_id) is not int or not 0 <= token_id < spec.vocab:
            raise UnsupportedModel(f"{key} is {token_id!r}, which is not a token of the vocabulary")
        return token_id

    normalized = read_speech_extractor(folder).get("do_normalize", False) is True
    info = Transcribes(
        kind="moonshine",
        features="normalized_samples" if normalized else "samples",
        sample_rate=SAMPLE_RATE,
        num_mel_bins=1,
        num_columns=round(WINDOW_SECONDS * SAMPLE_RATE),
        convolutions=encoder.stem.convolutions,
        window_seconds=WINDOW_SECONDS,
        num_positions=encoder.max_positions,
        max_output_tokens=spec.max_positions,
        start_token=token("decoder_start_token_id"),
        end_token=token("eos_token_id"),
        aligns_words=False,
    )
    return Facts(speech=SpeechToTextSpec(info=info))


FAMILIES = (Family(name="moonshine", config_types=("moonshine",), spec=moonshine, tensors=_NAMES, facts=_facts),)

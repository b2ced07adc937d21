"""Whisper, and models of its architecture with fewer layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.client.model_info import Transcribes
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import ConvStem, LearnedPositions
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CrossAttention,
    DecoderSpec,
    Embeddings,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight

WHISPER_NORM = LayerNormSpec(eps=1e-5)
_SAMPLE_RATE, _HOP = 16_000, 160  # samples per second, and per column of features
_STRIDE = 2  # columns of features per position of the encoder
_MAX_MEDIAN_WIDTH = 101


def whisper(config: Any) -> DecoderSpec:
    """Whisper: learned positions, norms before the branches, keys without bias."""
    hidden, act = config.d_model, config.activation_function
    heads, dim = config.decoder_attention_heads, config.d_model // config.decoder_attention_heads
    layer = Layer(
        attn=whisper_attention(hidden, heads),
        cross=CrossAttention(heads=heads, head_dim=dim, scale=dim**-0.5),
        ffn=PlainMLP(size=config.decoder_ffn_dim, act=act),
    )
    encoder_layer = Layer(
        attn=whisper_attention(hidden, config.encoder_attention_heads),
        ffn=PlainMLP(size=config.encoder_ffn_dim, act=act),
    )
    return DecoderSpec(
        hidden=hidden,
        vocab=config.vocab_size,
        layers=(layer,) * config.decoder_layers,
        norm=WHISPER_NORM,
        max_positions=config.max_target_positions,
        embeddings=Embeddings(positions=config.max_target_positions),
        tied=config.tie_word_embeddings,
        encoder=AudioEncoderSpec(
            stem=ConvStem(channels=config.num_mel_bins, act="gelu"),  # independent of activation_function
            positions=LearnedPositions(),
            hidden=hidden,
            layers=(encoder_layer,) * config.encoder_layers,
            norm=WHISPER_NORM,
            max_positions=config.max_source_positions,
        ),
    )


def whisper_attention(hidden: int, heads: int) -> GroupedQueryAttention:
    """Attention with biases and without positions."""
    dim = hidden // heads
    return GroupedQueryAttention(
        heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True
    )


def encoder_rules(prefix: str) -> tuple[tuple[str, str], ...]:
    """Rules for whisper's encoder. `prefix`: a pattern of the prefix of all names."""
    layer, to = prefix + r"layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
    return (
        (prefix + r"conv(?P<conv>1|2)" + KIND, "encoder.stem.conv{conv}.{kind}"),
        (prefix + r"embed_positions\.weight", "encoder.positions.table"),
        (layer + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, to + "attn.qkv.{kind}"),
        (layer + r"self_attn\.out_proj" + KIND, to + "attn.out.{kind}"),
        (layer + r"self_attn_layer_norm" + KIND, to + "attn_norm.{kind}"),
        (layer + r"fc1" + KIND, to + "ffn.up.{kind}"),
        (layer + r"fc2" + KIND, to + "ffn.down.{kind}"),
        (layer + r"final_layer_norm" + KIND, to + "ffn_norm.{kind}"),
        (prefix + r"layer_norm" + KIND, "encoder.norm.{kind}"),
    )


_DECODER = r"decoder\.layers\.(?P<layer>\d+)\."
_RULES = (
    (r"decoder\.embed_tokens\.weight", "embed.weight"),
    (r"decoder\.embed_positions\.weight", "embed_sum.positions"),
    (_DECODER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (_DECODER + r"self_attn\.out_proj" + KIND, "attn.out.{kind}"),
    (_DECODER + r"self_attn_layer_norm" + KIND, "attn_norm.{kind}"),
    (_DECODER + r"encoder_attn\.(?P<side>q|k|v)_proj" + KIND, "cross.{side}.{kind}"),
    (_DECODER + r"encoder_attn\.out_proj" + KIND, "cross.out.{kind}"),
    (_DECODER + r"encoder_attn_layer_norm" + KIND, "cross_norm.{kind}"),
    (_DECODER + r"fc1" + KIND, "ffn.up.{kind}"),
    (_DECODER + r"fc2" + KIND, "ffn.down.{kind}"),
    (_DECODER + r"final_layer_norm" + KIND, "ffn_norm.{kind}"),
    (r"decoder\.layer_norm" + KIND, "norm.{kind}"),
    (r"proj_out\.weight", "head.weight"),
    *encoder_rules(r"encoder\."),
)
_NAMES = WeightNames(
    _RULES,
    ignored=r"proj_out\.weight",
    convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
    zero_keys=r"(encoder\.)?layers\.\d+\.attn\.qkv\.bias",
)


def _facts(folder: Path, config: Any, _spec: DecoderSpec) -> Facts:
    return Facts(speech=read_speech(folder, config))


def read_speech(folder: Path, config: Any) -> SpeechToTextSpec:
    """Read generation_config.json and the tokenizer's special tokens of a whisper model.

    Args:
        folder: the model's directory.
        config: the model's Hugging Face config.

    Raises:
        UnsupportedModel: a token is missing, or a number cannot be used.
    """
    generation = read_json(folder / "generation_config.json", BrokenFolder)
    tokens = _special_tokens(folder)
    vocab: int = config.vocab_size

    def token(key: str, *names: str) -> int | None:
        configured = generation.get(key)
        token_id = (
            configured if type(configured) is int else next((tokens[name] for name in names if name in tokens), None)
        )
        return token_id if token_id is not None and 0 <= token_id < vocab else None

    def required(key: str, *names: str) -> int:
        token_id = token(key, *names)
        if token_id is None:
            raise UnsupportedModel(f"generation_config.json has no {key}, and the tokenizer no token {names[0]}")
        return token_id

    without = required("no_timestamps_token_id", "<|notimestamps|>")
    tasks = {name: tokens.get(f"<|{name}|>") for name in ("transcribe", "translate")}
    tasks |= {name: token for name, token in _ids(generation, "task_to_id", vocab).items() if name in tasks}
    languages = _languages(generation, tokens, vocab)
    columns = _STRIDE * config.max_source_positions
    info = Transcribes(
        kind="whisper",
        sample_rate=_SAMPLE_RATE,
        num_mel_bins=config.num_mel_bins,
        num_columns=columns,
        window_seconds=columns * _HOP / _SAMPLE_RATE,
        num_positions=config.max_source_positions,
        max_output_tokens=config.max_target_positions,
        languages=languages,
        start_token=_start(generation, config, tokens),
        transcribe_token=tasks["transcribe"] if languages else None,
        translate_token=tasks["translate"] if languages else None,
        no_timestamps_token=without,
        timestamp_begin=without + 1,
        max_initial_timestamp=_count(generation, "max_initial_timestamp_index"),
        no_speech_token=token("no_speech_token_id", "<|nospeech|>", "<|nocaptions|>") or without - 1,
        previous_token=token("prev_sot_token_id", "<|startofprev|>"),
        end_token=required("eos_token_id", "<|endoftext|>"),
        suppress_tokens=_tokens(generation, config, "suppress_tokens"),
        begin_suppress_tokens=_tokens(generation, config, "begin_suppress_tokens"),
        aligns_words=True,
        time_precision=_STRIDE * _HOP / _SAMPLE_RATE,
    )
    if without + 1 >= vocab:
        raise UnsupportedModel(f"the vocabulary of {vocab} ends before the first timestamp, {without + 1}")
    return SpeechToTextSpec(
        info=info, alignment_heads=_alignment_heads(generation, config), median_width=_median_width(config)
    )


def _special_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokens that look like <|name|>."""
    special_tokens: dict[str, int] = {}
    for entry in _listed(read_json(folder / "tokenizer.json", BrokenFolder).get("added_tokens")):
        if isinstance(entry, Mapping) and type(entry.get("id")) is int and isinstance(entry.get("content"), str):
            special_tokens[entry["content"]] = entry["id"]
    added = read_json(folder / "added_tokens.json", BrokenFolder)
    return special_tokens | {name: token for name, token in added.items() if type(token) is int}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ids(generation: Mapping[str, Any], key: str, vocab: int) -> dict[str, int]:
    configured = generation.get(key)
    entries = configured.items() if isinstance(configured, Mapping) else ()
    return {name: token for name, token in entries if type(token) is int and 0 <= token < vocab}


def _languages(generation: Mapping[str, Any], tokens: Mapping[str, int], vocab: int) -> dict[str, int]:
    """Token of each language; none for a model of English alone."""
    if generation.get("is_multilingual") is False:
        return {}
    named = _ids(generation, "lang_to_id", vocab) or {
        name: token for name, token in tokens.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", name) and token < vocab
    }
    return {name.removeprefix("<|").removesuffix("|>"): token for name, token in named.items()}


def _start(generation: Mapping[str, Any], config: Any, tokens: Mapping[str, int]) -> int:
    configured = generation.get("decoder_start_token_id", tokens.get("<|startoftranscript|>"))
    token: Any = config.decoder_start_token_id if configured is None else configured
    if type(token) is not int or not 0 <= token < config.vocab_size:
        raise UnsupportedModel(f"decoder_start_token_id is {token!r}, which is not a token of the vocabulary")
    return token


def _tokens(generation: Mapping[str, Any], config: Any, key: str) -> tuple[int, ...]:
    """Tokens of the vocabulary that a list names."""
    configured = generation.get(key, getattr(config, key, None)) or ()
    return tuple(token for token in configured if type(token) is int and 0 <= token < config.vocab_size)


def _count(generation: Mapping[str, Any], key: str) -> int | None:
    configured = generation.get(key)
    return configured if type(configured) is int and configured >= 0 else None


def _alignment_heads(generation: Mapping[str, Any], config: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of layer and head; without a list, as in openai's code, all heads of the upper half of the layers.

    Distilled models list heads of their teacher's layers, which they do not have.
    """
    layers, heads = range(config.decoder_layers), range(config.decoder_attention_heads)
    pairs = [pair for pair in _listed(generation.get("alignment_heads")) if isinstance(pair, list) and len(pair) == 2]
    known = tuple((layer, head) for layer, head in pairs if layer in layers and head in heads)
    return known or tuple((layer, head) for layer in layers[len(layers) // 2 :] for head in heads)


def _median_width(config: Any) -> int:
    width = config.median_filter_width
    if type(width) is not int or width % 2 != 1 or not 0 < width <= _MAX_MEDIAN_WIDTH:
        raise BrokenFolder(f"config.json: median_filter_width must be odd and at most {_MAX_MEDIAN_WIDTH}, not {width}")
    return width


FAMILIES = (Family(name="whisper", config_types=("whisper",), spec=whisper, tensors=_NAMES, facts=_facts),)

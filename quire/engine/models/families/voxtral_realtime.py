"""Voxtral Realtime: a causal encoder of audio, whose outputs are added to the embeddings of a Mistral's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.streaming import DelayedStreamsInfo
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_log_mel
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.families.llama import LLAMA, attention, mistral
from quire.engine.models.families.qwen2_audio import TOWER, with_tower
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import CausalConvStem, Projector
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec, GatedMLP, Layer, RMSNormSpec
from quire.engine.models.specs.tensor_names import KIND, NamedTensors, WeightNames, linear_weight

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_HALVINGS = 2  # columns of features that the stem makes one position of
_LEFT_FRAMES = 32  # of silence before the audio, as Mistral's tokenizers have it
_MORE_RIGHT_FRAMES = 11  # of silence behind the audio, beside the delay: for a long last word
_START, _PAD = ("<s>", 1), ("[STREAMING_PAD]", 32)  # tokens, and their ids if no file has them
_MAX_DELAY = 1000  # frames
_LOUDEST = 1.5  # logarithm of the power that the floor is 8 powers of ten below
_RANGE = 8.0
_PARTS = ("post_attention_layernorm", "ada_rms_norm.linear1", "ada_rms_norm.linear2")
_FOLDED = re.compile(rf"(?P<layer>.*\blayers\.\d+\.)(?P<part>{'|'.join(map(re.escape, _PARTS))})\.weight")
_THETA = 10_000.0
_CAUSAL_LAYER, _CAUSAL_TO = TOWER + r"layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
_CAUSAL = (
    (TOWER + r"embedder\.conv(?P<conv>1|2)" + KIND, "encoder.stem.conv{conv}.{kind}"),
    (_CAUSAL_LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, _CAUSAL_TO + "attn.qkv.{kind}"),
    (_CAUSAL_LAYER + r"self_attn\.o_proj" + KIND, _CAUSAL_TO + "attn.out.{kind}"),
    (_CAUSAL_LAYER + r"self_attn_layer_norm\.weight", _CAUSAL_TO + "attn_norm.weight"),
    (_CAUSAL_LAYER + r"mlp\.(?P<part>gate|up)_proj\.weight", _CAUSAL_TO + "ffn.gate_up.weight"),
    (_CAUSAL_LAYER + r"mlp\.down_proj" + KIND, _CAUSAL_TO + "ffn.down.{kind}"),
    (_CAUSAL_LAYER + r"final_layer_norm\.weight", _CAUSAL_TO + "ffn_norm.weight"),
    (TOWER + r"norm\.weight", "encoder.norm.weight"),
)


def voxtral_realtime(config: Any) -> DecoderSpec:
    """Voxtral Realtime, without the layers that read the delay: they are folded into norms, see `fold_delay`."""
    text, audio, joined = mistral(config.text_config), config.audio_config, config.downsample_factor
    if config.audio_length_per_tok != _HALVINGS * joined:
        raise UnsupportedModel(
            f"audio_length_per_tok is {config.audio_length_per_tok}; it must be {_HALVINGS} * downsample_factor, "
            f"which is {joined}"
        )
    layer = Layer(
        attn=attention(audio, window=audio.sliding_window, qkv_bias=True, out_bias=True),
        ffn=GatedMLP(size=audio.intermediate_size, act=audio.hidden_act, down_bias=True),
    )
    encoder = AudioEncoderSpec(
        stem=CausalConvStem(channels=audio.num_mel_bins, act="gelu"),  # whatever the other activations are
        positions=None,
        hidden=audio.hidden_size,
        layers=(layer,) * audio.num_hidden_layers,
        norm=RMSNormSpec(eps=audio.rms_norm_eps),
        max_positions=joined * text.max_positions,
        joined=joined,
        projector=Projector(sizes=(text.hidden, text.hidden), bias=False, act=config.projector_hidden_act),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)


def _names(_spec: DecoderSpec, facts: Facts) -> WeightNames:
    assert isinstance(facts.streaming, DelayedStreamsInfo)
    return with_tower(
        LLAMA,
        _CAUSAL,
        convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
        zero_keys=r"encoder\.layers\.\d+\.attn\.qkv\.bias",
        prepare=partial(fold_delay, facts.streaming.delay_frames),
    )


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    rows: int = config.audio_config.num_mel_bins
    extractor = check_log_mel(folder, rows)
    loudest = extractor.get("global_log_mel_max", _LOUDEST)
    if type(loudest) not in (float, int):
        raise UnsupportedModel(
            f"the feature extractor's global_log_mel_max is {loudest!r}: the floor of the features must not depend on "
            "all of the audio"
        )
    delay = config.default_num_delay_tokens
    if type(delay) is not int or not 0 <= delay <= _MAX_DELAY:
        raise UnsupportedModel(f"default_num_delay_tokens must be from 0 to {_MAX_DELAY}, not {delay!r}")
    ids = _special_ids(folder)
    start, pad = (_token(ids, *token, spec.vocab) for token in (_START, _PAD))
    info = DelayedStreamsInfo(
        sample_rate=SAMPLE_RATE,
        num_mel_bins=rows,
        columns_per_frame=config.audio_length_per_tok,
        floor=loudest - _RANGE,
        delay_frames=delay,
        left_frames=_LEFT_FRAMES,
        right_frames=delay + _MORE_RIGHT_FRAMES,
        start_token=start,
        pad_token=pad,
    )
    return Facts(streaming=info)


def _special_ids(folder: Path) -> dict[str, int]:
    """Special tokens by their texts: those of tokenizer.json, or of Mistral's tekken.json."""
    for name, entries, text, token in (
        ("tokenizer.json", "added_tokens", "content", "id"),
        ("tekken.json", "special_tokens", "token_str", "rank"),
    ):
        path = folder / name
        if path.is_file():
            try:
                special_tokens = json.loads(path.read_text(encoding="utf-8")).get(entries) or []
                return {entry[text]: int(entry[token]) for entry in special_tokens}
            except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
                raise BrokenFolder(f"{path} cannot be read: {error}") from error
    return {}


def _token(ids: dict[str, int], text: str, usual: int, vocab: int) -> int:
    token_id = ids.get(text, usual)
    if not 0 <= token_id < vocab:
        raise UnsupportedModel(f"the token {text} is {token_id}, which is not in the vocabulary of {vocab}")
    return token_id


def fold_delay(delay: int, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, without the layers that read the delay.

    The norm before each feed-forward is multiplied by 1 + linear2(gelu(linear1(t))), where t are sines and cosines of
    the delay. They are constants, so they become part of the norm's weight.

    Args:
        delay: number of frames.
        tensors: names and tensors of the checkpoint.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _FOLDED.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(match["layer"], {})
        # A copy: the pages behind a tensor are released once it has been read.
        parts[match["part"]] = tensor.float().clone()
        if len(parts) == len(_PARTS):
            del waiting[match["layer"]]
            yield f"{match['layer']}{_PARTS[0]}.weight", _folded(parts, delay).to(tensor.dtype)
    for layer, parts in waiting.items():
        for part, tensor in parts.items():  # the filler says what is missing
            yield f"{layer}{part}.weight", tensor


def _folded(parts: dict[str, Tensor], delay: int) -> Tensor:
    import torch  # noqa: PLC0415 families are read without it

    norm, down, up = (parts[name] for name in _PARTS)
    half = len(norm) // 2
    angles = delay * torch.exp(-torch.log(torch.tensor(_THETA)) * torch.arange(half).float() / half)
    time = torch.cat((angles.cos(), angles.sin()))
    factors: Tensor = 1 + up @ torch.nn.functional.gelu(down @ time)
    return norm * factors


FAMILIES = (
    Family(
        name="voxtral_realtime",
        config_types=("voxtral_realtime",),
        spec=voxtral_realtime,
        tensors=_names,
        facts=_facts,
    ),
)

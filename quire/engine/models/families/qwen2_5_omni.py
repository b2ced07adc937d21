"""Qwen2.5-Omni, of which the part that reads is supported: text, pictures, videos and audio. It does not speak."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.client.pictures import VideoInfo, VideoSound
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_log_mel
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.rope import axes_in_sections
from quire.engine.models.config.video_processor import VideoProcessor
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families import qwen_vl
from quire.engine.models.families.qwen2_audio import TOWER, whisper_layers
from quire.engine.models.families.qwen_vl import grid_tower, with_axes
from quire.engine.models.families.whisper import WHISPER_NORM, encoder_rules
from quire.engine.models.family import Composite, Facts, RawConfig, text_config
from quire.engine.models.specs.audio import ConvStem, Projector, SinusoidalPositions
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight

_SECTIONS = (16, 24, 24)  # pairs of elements of time, height and width, if a config does not say
_POOL = 2  # positions that are averaged
_FRAMES = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}  # of its processor, whatever the folder says
_RATE = 2.0  # frames in a second, if nothing says how many
_BEGIN, _END = "<|audio_bos|>", "<|audio_eos|>"
_AUDIO_TOKEN, _VIDEO_TOKEN = "<|AUDIO|>", "<|VIDEO|>"
_SILENT = 2  # columns behind audio, which its last ones overlap
_PARTS = re.compile(r"(?:thinker\.)?(?:model\.)?(?P<part>visual|audio_tower)\.(?P<name>.*)")
_LANGUAGE_MODEL = re.compile(r"(?:thinker\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?(?P<name>.*)")
_SPEAKING = re.compile(r"(?:talker|token2wav)\..*")
_AUDIO = (
    *encoder_rules(TOWER),
    (TOWER + r"ln_post" + KIND, "encoder.norm.{kind}"),
    (TOWER + r"proj" + KIND, "encoder.projector.linears.0.{kind}"),
)


def _spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Whisper's encoder over chunks of two seconds, which do not read each other."""
    audio = config.audio_config
    if audio.n_window % _POOL:
        raise UnsupportedModel(f"audio_config: n_window is {audio.n_window}, not an even number")
    encoder = AudioEncoderSpec(
        stem=ConvStem(channels=audio.num_mel_bins, act="gelu"),
        positions=SinusoidalPositions(),
        hidden=audio.hidden_size,
        layers=whisper_layers(audio),
        norm=WHISPER_NORM,
        max_positions=audio.n_window,
        averaged=_POOL,
        projector=Projector(sizes=(audio.output_dim,), bias=True),
    )
    whole = replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)
    return with_axes(whole, axes_in_sections(config.text_config, _SECTIONS))


def plain_name(name: str) -> str | None:
    """The name of a tensor of the encoder of audio, or in checkpoints of the language model alone."""
    if _SPEAKING.fullmatch(name):
        return None
    if part := _PARTS.fullmatch(name):
        return f"audio_tower.{part['name']}" if part["part"] == "audio_tower" else None
    inner = _LANGUAGE_MODEL.fullmatch(name)
    assert inner is not None
    return inner["name"] if inner["name"].startswith("lm_head.") else f"model.{inner['name']}"


def module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if pictures do not need it."""
    return qwen_vl.module_name(name.removeprefix("thinker."))


def _names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    return replace(
        text,
        rules=(*text.rules, *_AUDIO),
        ignored=rf"{text.ignored}|audio_tower\.audio_bos_eos_token\..*|audio_tower\.positional_embedding\..*",
        convert={**text.convert, **{f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)}},
        zero_keys=r"encoder\.layers\.\d+\.attn\.qkv\.bias",
    )


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    assert spec.encoder is not None
    stem = spec.encoder.stem
    assert isinstance(stem, ConvStem)
    check_log_mel(folder, stem.channels)
    placeholder = check_placeholder(config.audio_token_id, spec.vocab)
    columns = 2 * spec.encoder.max_positions
    audio = AudioInfo(
        kind="qwen2_5_omni",
        placeholder=placeholder,
        placeholder_text=f"{_BEGIN}{text_of(folder, placeholder, _AUDIO_TOKEN)}{_END}",
        sample_rate=SAMPLE_RATE,
        num_mel_bins=stem.channels,
        item_columns=columns,
        lengths=AudioLengths(columns, 1, _POOL),
        padded_columns=1,
        silent_columns=_SILENT,
    )
    return Facts(audio=audio)


def _video(folder: Path, config: Any, vocab: int) -> tuple[VideoProcessor, VideoInfo]:
    """Frames follow each other, and positions of time tell when they are seen; sound may stand between them."""
    processor = VideoProcessor.read(folder, "qwen2vl")
    token = check_placeholder(config.video_token_id, vocab, "video_token_id")
    audio = text_of(folder, config.audio_token_id, _AUDIO_TOKEN)
    part = int(config.position_id_per_seconds * config.seconds_per_chunk)
    item = config.audio_config.n_window // _POOL  # tokens
    if part < 1 or part % item:
        raise UnsupportedModel(f"parts of {part} tokens of a video's sound would divide items of {item}")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, token, _VIDEO_TOKEN),
        geometry=structs.replace(processor.frame_area(), **_FRAMES),
        sampling=processor.sampling(),
        group=config.vision_config.temporal_patch_size,
        is_timed=True,
        tokens_per_second=config.position_id_per_seconds,
        nominal_rate=_RATE,
        ends_at_largest=True,
        sound=VideoSound(part=part, token=audio, before=_BEGIN, after=_END),
    )


def _published(raw: RawConfig) -> RawConfig:
    """The config of the part that reads."""
    thinker = raw.get("thinker_config")
    if not isinstance(thinker, dict):
        raise UnsupportedModel(f"thinker_config must be an object, not {thinker!r}")
    names = ["Qwen2_5OmniThinkerForConditionalGeneration"]
    return {**thinker, "model_type": "qwen2_5_omni_thinker", "architectures": names}


FAMILIES = (
    Composite(
        name="qwen2_5_omni",
        config_types=("qwen2_5_omni_thinker",),
        language_model=text_config,
        spec=_spec,
        tensors=_names,
        facts=_facts,
        plain_name=plain_name,
        tower=grid_tower(
            "qwen2vl", placeholder="<|IMAGE|>", video=_video, module_name=module_name, unused=("audio_tower",)
        ),
        published={"qwen2_5_omni": _published},
    ),
)

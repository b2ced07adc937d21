"""Qwen 2 Audio, and what language models with Whisper's encoder have in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_log_mel
from quire.engine.models.config.placeholder import check_placeholder
from quire.engine.models.families.whisper import WHISPER_NORM, encoder_rules, whisper_attention
from quire.engine.models.family import Composite, Facts, text_config
from quire.engine.models.specs.audio import ConvStem, LearnedPositions, Projector
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec, Layer, PlainMLP
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight

TOWER = r"audio_tower\."
PROJECTOR = (
    (r"multi_modal_projector\.linear(?:_1)?" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"multi_modal_projector\.linear_2" + KIND, "encoder.projector.linears.1.{kind}"),
)
_CONTEXT = 2  # columns that the two convolutions of the stem read behind their last one


def qwen2_audio(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Qwen 2 Audio: whisper's encoder, whose positions are averaged in pairs."""
    projector = Projector(sizes=(text.hidden,), bias=True)
    return replace(text, tied=False, encoder=replace(whisper_like(config), averaged=2, projector=projector))


def whisper_like(config: Any) -> AudioEncoderSpec:
    """Whisper's encoder, without a projector."""
    audio = config.audio_config
    return AudioEncoderSpec(
        stem=ConvStem(channels=audio.num_mel_bins, act="gelu"),
        positions=LearnedPositions(),
        hidden=audio.hidden_size,
        layers=whisper_layers(audio),
        norm=WHISPER_NORM,
        max_positions=audio.max_source_positions,
    )


def whisper_layers(audio: Any) -> tuple[Layer, ...]:
    """The layers of Whisper's encoder."""
    layer = Layer(
        attn=whisper_attention(audio.hidden_size, audio.num_attention_heads),
        ffn=PlainMLP(size=audio.intermediate_size, act=audio.activation_function),
    )
    count: int = audio.num_hidden_layers
    return (layer,) * count


def with_tower(text: WeightNames, rules: tuple[tuple[str, str], ...], **options: Any) -> WeightNames:
    """The names of a language model, and of a tower and a projector beside it.

    Args:
        text: names of the language model.
        rules: names of the tower.
        options: fields of `WeightNames` in place of the language model's.
    """
    return replace(
        text,
        rules=(*text.rules, *rules, *PROJECTOR),
        # With and without the name of the model around all of it, as transformers has written them at different times.
        prefixes=rf"(?:model\.)?language_model\.(?:{text.prefixes})?|model\.(?=audio_tower\.|multi_modal_projector\.)",
        ignored=rf"{text.ignored}|lm_head\.weight",
        **options,
    )


def whisper_like_names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    """How the checkpoints of a language model with Whisper's encoder name their tensors."""
    return with_tower(
        text,
        encoder_rules(TOWER),
        convert={**text.convert, **{f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)}},
        zero_keys=r"encoder\.layers\.\d+\.attn\.qkv\.bias",
    )


def padded_audio(folder: Path, encoder: AudioEncoderSpec) -> dict[str, Any]:
    """Fields of `AudioInfo` of a model whose audio is filled up to whole windows.

    Raises:
        BrokenFolder: a file cannot be read.
        UnsupportedModel: the feature extractor is not supported.
    """
    assert isinstance(encoder.stem, ConvStem)
    check_log_mel(folder, encoder.stem.channels)
    columns = 2 * encoder.max_positions
    return {
        "sample_rate": SAMPLE_RATE,
        "num_mel_bins": encoder.stem.channels,
        "item_columns": columns,
        "lengths": AudioLengths(columns, 1, encoder.averaged * encoder.joined),
        "padded_columns": columns,
    }


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    assert spec.encoder is not None
    audio = AudioInfo(
        kind="qwen2_audio",
        placeholder=check_placeholder(config.audio_token_id, spec.vocab),
        placeholder_text="<|audio_bos|><|AUDIO|><|audio_eos|>",
        columns_after=_CONTEXT,
        max_items=1,
        **padded_audio(folder, spec.encoder),
    )
    return Facts(audio=audio)


FAMILIES = (
    Composite(
        name="qwen2_audio",
        config_types=("qwen2_audio",),
        language_model=text_config,
        spec=qwen2_audio,
        tensors=whisper_like_names,
        facts=_facts,
    ),
)

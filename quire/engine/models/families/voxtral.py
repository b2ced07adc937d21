"""Voxtral."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.client.audio import AudioInfo
from quire.engine.models.config.placeholder import check_placeholder
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.qwen2_audio import padded_audio, whisper_like, whisper_like_names
from quire.engine.models.family import Composite, Facts, text_config
from quire.engine.models.specs.audio import Projector
from quire.engine.models.specs.decoder import DecoderSpec

_PLACEHOLDER = 24  # what transformers assumes


def voxtral(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Voxtral: whisper's encoder, of whose positions as many are joined as the projector reads."""
    audio = config.audio_config
    joined, remainder = divmod(audio.intermediate_size, audio.hidden_size)
    if remainder or not joined:
        raise UnsupportedModel(
            f"the projector reads {audio.intermediate_size} elements, not a multiple of {audio.hidden_size}"
        )
    projector = Projector(sizes=(text.hidden, text.hidden), bias=False, act=config.projector_hidden_act)
    return replace(text, tied=False, encoder=replace(whisper_like(config), joined=joined, projector=projector))


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    assert spec.encoder is not None
    token = _PLACEHOLDER if config.audio_token_id is None else config.audio_token_id
    audio = AudioInfo(
        kind="voxtral",
        placeholder=check_placeholder(token, spec.vocab),
        placeholder_text="[BEGIN_AUDIO][AUDIO]",
        encodes_padding=True,
        **padded_audio(folder, spec.encoder),
    )
    return Facts(audio=audio)


FAMILIES = (
    Composite(
        name="voxtral",
        config_types=("voxtral",),
        language_model=text_config,
        spec=voxtral,
        tensors=whisper_like_names,
        facts=_facts,
    ),
)

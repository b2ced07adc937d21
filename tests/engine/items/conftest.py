"""Tiny models that read audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.audio_models import make_audio_model, save_audio_model
from tests.support.vision_models import MadeWhenAsked


@pytest.fixture(scope="session")
def audio_models() -> dict[str, Any]:
    """transformers' models by kind."""
    return MadeWhenAsked(make_audio_model)


@pytest.fixture(scope="session")
def audio_folders(audio_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return MadeWhenAsked(lambda kind: save_audio_model(audio_models[kind], tmp_path_factory.mktemp(kind)))

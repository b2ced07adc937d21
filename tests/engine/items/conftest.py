"""Tiny models that read audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.audio_models import KINDS, make_audio_model, save_audio_model


@pytest.fixture(scope="session")
def audio_models() -> dict[str, Any]:
    """transformers' models by kind."""
    return {kind: make_audio_model(kind) for kind in KINDS}


@pytest.fixture(scope="session")
def audio_folders(audio_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return {kind: save_audio_model(audio_models[kind], tmp_path_factory.mktemp(kind)) for kind in KINDS}

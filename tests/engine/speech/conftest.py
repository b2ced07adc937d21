"""A tiny whisper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.whisper import make_whisper, save_whisper


@pytest.fixture(scope="session")
def whisper() -> Any:
    """transformers' model of `whisper_folder`."""
    return make_whisper()


@pytest.fixture(scope="session")
def whisper_folder(whisper: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny whisper."""
    return save_whisper(whisper, tmp_path_factory.mktemp("whisper"))

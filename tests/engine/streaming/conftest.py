"""Tiny models that transcribe audio while it arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.transducer_models import make_transducer, save_transducer


@pytest.fixture(scope="session")
def streaming_model() -> Any:
    """transformers' model."""
    return make_streaming_model()


@pytest.fixture(scope="session")
def streaming_folder(streaming_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return save_streaming_model(streaming_model, tmp_path_factory.mktemp("streaming"))


@pytest.fixture(scope="session")
def transducer() -> Any:
    """transformers' model of a transducer."""
    return make_transducer()


@pytest.fixture(scope="session")
def transducer_folder(transducer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return save_transducer(transducer, tmp_path_factory.mktemp("transducer"))

"""Tiny models that read pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_models import MadeWhenAsked, make_composite, save_seeing


@pytest.fixture(scope="session")
def seeing_models() -> dict[str, Any]:
    """transformers' models by case."""
    return MadeWhenAsked(make_composite)


@pytest.fixture(scope="session")
def seeing_folders(seeing_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return MadeWhenAsked(lambda case: save_seeing(seeing_models[case], case, tmp_path_factory.mktemp(case)))

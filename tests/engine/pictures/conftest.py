"""Tiny models that read pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_models import SEES, make_composite, save_seeing


@pytest.fixture(scope="session")
def seeing_models() -> dict[str, Any]:
    """transformers' models by case."""
    return {case: make_composite(case) for case in SEES}


@pytest.fixture(scope="session")
def seeing_folders(seeing_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return {case: save_seeing(seeing_models[case], case, tmp_path_factory.mktemp(case)) for case in SEES}

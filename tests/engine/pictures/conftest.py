"""Tiny models that read pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_models import make_composite, save_seeing


class ByCase(dict[str, Any]):
    """Values by case, each made when a test needs it: a worker runs the tests of some cases only."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, case: str) -> Any:
        value = self[case] = self._make(case)
        return value


@pytest.fixture(scope="session")
def seeing_models() -> dict[str, Any]:
    """transformers' models by case."""
    return ByCase(make_composite)


@pytest.fixture(scope="session")
def seeing_folders(seeing_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return ByCase(lambda case: save_seeing(seeing_models[case], case, tmp_path_factory.mktemp(case)))

"""Tiny models that read pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_models import make_composite, save_seeing


class Made(dict[str, Any]):
    """Values by case, which are made when they are first asked for: a process of the tests needs few of them."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, case: str) -> Any:
        self[case] = made = self._make(case)
        return made


@pytest.fixture(scope="session")
def seeing_models() -> dict[str, Any]:
    """transformers' models by case."""
    return Made(make_composite)


@pytest.fixture(scope="session")
def seeing_folders(seeing_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders."""
    return Made(lambda case: save_seeing(seeing_models[case], case, tmp_path_factory.mktemp(case)))

"""How several engines in one server share the free memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.app import engines
from quire.app.engines import memory_share
from quire.app.models import ModelSource


def source(folder: Path, weights: int) -> ModelSource:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return ModelSource(folder, str(folder), (folder.name,))


def test_engines_divide_what_the_weights_of_all_leave_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda: 10_000)
    small, large = source(tmp_path / "small", 1000), source(tmp_path / "large", 5000)
    assert memory_share([small, large]) == 2000
    assert memory_share([small]) is None
    assert memory_share([large, source(tmp_path / "huge", 9000)]) == 0

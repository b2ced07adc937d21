"""`quire bench startup`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.process import quire, tiny_model


def test_start_up_is_timed(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    result = tmp_path / "result.json"
    said = quire("bench", "startup", str(folder), "--runs", "1", "--result", str(result))
    figures = json.loads(result.read_text())
    assert 0 < figures["ready_s"]["median"] <= figures["first_token_s"]["median"]
    assert figures["cpu_s"]["median"] > 0
    assert figures["peak_mb"]["median"] > 100
    assert "first_token_s" in said

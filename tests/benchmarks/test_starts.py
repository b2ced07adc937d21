"""The comparison of starts of two builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import starts
from quire.app.bench.startup import FIGURES


def test_starts_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], str, str]] = []

    def timed_start(arguments: list[str], _: float, *, cwd: str, env: dict[str, str]) -> dict[str, float]:
        calls.append((arguments, cwd, env["PYTHONPATH"]))
        number = (len(calls) - 1) // 2  # the machine becomes slower
        return dict.fromkeys(FIGURES, 1000.0 if number == 0 else number * (1.0 if cwd == "/new" else 2.0))

    monkeypatch.setattr(starts, "timed_start", timed_start)
    model, out = tmp_path / "model", tmp_path / "out.json"
    command = [
        "starts",
        str(model),
        "old=/old",
        "new=/new",
        "--runs",
        "3",
        "--out",
        str(out),
        "--",
        "--dtype",
        "float32",
    ]
    monkeypatch.setattr(sys, "argv", command)
    starts.main()

    arguments = [str(model), "--dtype", "float32"]
    assert calls == [(arguments, "/old", "/old"), (arguments, "/new", "/new")] * 4
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["ratios"] == dict.fromkeys(FIGURES, 0.5)
    assert [row[FIGURES[0]] for row in result["runs"]["old"]] == [2.0, 4.0, 6.0]  # not the first start
    assert set(result["figures"]) == {"old", "new"}
    assert str(tmp_path) not in out.read_text()

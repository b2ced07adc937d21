"""`quire bench startup`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.process import tiny_model


def quire(*arguments: str, stdin: str | None = None, status: int = 0) -> str:
    """Output of a command."""
    out = subprocess.run(
        [sys.executable, "-m", "quire", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert out.returncode == status, out.stdout + out.stderr
    return out.stdout + (out.stderr if status else "")


def test_start_up_is_timed(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    result = tmp_path / "result.json"
    said = quire("bench", "startup", str(folder), "--runs", "1", "--result", str(result))
    figures = json.loads(result.read_text())
    assert 0 < figures["ready_s"]["median"] <= figures["first_token_s"]["median"]
    assert figures["peak_mb"]["median"] > 100
    assert "first_token_s" in said

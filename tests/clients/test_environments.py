"""`bin/setup` makes the environments of the client scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SETUP = HERE.parents[1] / "bin" / "setup"


@pytest.mark.parametrize("script", ["use_litellm.py", "use_embeddings_llamaindex.py"])
def test_a_script_gets_what_it_needs(script: str, tmp_path: Path) -> None:
    """With a `pip` that writes down what it is asked for; one of the scripts has two lines of needs."""
    (tmp_path / "bin").mkdir()
    shutil.copy(SETUP, tmp_path / "bin")
    home = tmp_path / "tests" / "clients" / ".venvs" / script.removesuffix(".py") / "bin"
    home.mkdir(parents=True)
    for name in ("python", "pip"):
        (home / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@" >asked\n')
        (home / name).chmod(0o755)
    shutil.copy(HERE / script, tmp_path / "tests" / "clients")
    command = f"set -e; source bin/setup; client_environment tests/clients/{script}; echo next"
    ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "next\n"
    lines = (HERE / script).read_text(encoding="utf-8").splitlines()
    needs = [need for line in lines if line.startswith("# needs: ") for need in line.split()[2:]]
    assert len(needs) > 1
    assert (tmp_path / "asked").read_text(encoding="utf-8").split()[-len(needs) :] == needs

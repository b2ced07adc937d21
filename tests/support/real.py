"""Real weights and recordings of people: tests with the marker `real` read them from a folder of the user."""

from __future__ import annotations

import os
import pathlib

import pytest


def real_files(name: str) -> pathlib.Path:
    """Return the file or folder of this name in the folder that the variable REAL_WEIGHTS names; fail without it."""
    folder = os.environ.get("REAL_WEIGHTS")
    if not folder:
        pytest.fail("REAL_WEIGHTS has to name a folder of real weights")
    path = pathlib.Path(folder, name)
    if not path.exists():
        pytest.fail(f"REAL_WEIGHTS has no {name}")
    return path

"""Runs the tests of devices with Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support import triton_interpreter

triton_interpreter.prepare()


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """The interpreter's operations are on few elements."""

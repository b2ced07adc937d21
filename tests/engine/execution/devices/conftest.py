"""Runs the tests of devices with Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support import triton_interpreter

triton_interpreter.prepare()

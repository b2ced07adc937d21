"""Runs the tests of devices with Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support.triton_interpreter import accept_computed_bounds, separate_rows

accept_computed_bounds()
separate_rows()

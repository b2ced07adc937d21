"""Runs the tests of devices with Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
pytest.importorskip("triton")

from tests.support.triton_interpreter import accept_computed_bounds, separate_rows

accept_computed_bounds()
separate_rows()

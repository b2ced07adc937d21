"""Runs the Triton kernels of this package's tests under Triton's interpreter, or on the GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.kernels import gpu

pytest.importorskip("triton")

from tests.support import triton_interpreter

triton_interpreter.prepare()


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device of the tensors that are given to kernels."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with gpu.interpreted(), np.errstate(all="ignore"):  # NaN and infinities are no errors in kernels
        yield torch.device("cpu")

"""Loads and runs models with the Triton kernels, under Triton's interpreter or on the GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from typing_extensions import override

from quire.engine.execution.devices.host import ReferenceDevice
from quire.engine.models.checkpoint import weights
from quire.kernels import gpu, native
from tests.kernels.triton.conftest import device  # noqa: F401 prepares the interpreter


class InterpretedDevice(ReferenceDevice):
    """The CPU, with Triton kernels where there are any."""

    quantizable_dtypes = frozenset((torch.float32, torch.bfloat16))

    @override
    def activate(self) -> AbstractContextManager[None]:
        return _interpreted()


@contextmanager
def _interpreted() -> Iterator[None]:
    with native.disabled(), gpu.interpreted():
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the test run on `InterpretedDevice`."""
    if not gpu.is_interpreted():
        pytest.skip("there is a GPU, and its device has tests of its own")
    for module in ("quire.engine.build.engine", "tests.support.engine"):
        monkeypatch.setattr(f"{module}.find_device", lambda *_: InterpretedDevice())
    monkeypatch.setattr(weights, "_maps_at_first_write", lambda _: False)

"""Recorded kernel calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from quire.kernels import native
from quire.kernels.add import add_scaled, reference
from quire.kernels.recording import Recording, Workspace
from quire.kernels.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="only the compiled kernels can be recorded")


Function = Callable[[torch.Tensor], torch.Tensor]
LOOKING: list[Function] = [
    lambda x: x,
    lambda x: x.view(32, 4).view(4, 32),
    lambda x: x.float().contiguous(),
]
COMPUTING: list[Function] = [
    lambda x: x.exp(),
    lambda x: x.bfloat16().float(),
    lambda x: x.T.contiguous().view(4, 32),
    lambda x: x.T.reshape(4, 32),
    lambda x: x * x.tolist()[0][0],
    lambda x: x.clone(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 21), (40, 1024)])
def test_sums_of_branches(dtype: torch.dtype, scale: float, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    torch.testing.assert_close(add_scaled(x, y, scale), reference(x, y, scale))


def test_a_replay_computes_with_what_its_inputs_hold_then() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)

    def function() -> torch.Tensor:
        branch = rms_norm(x, weight, 1e-6)
        for _ in range(5):  # what is dropped on the way makes room for the next
            branch = add_scaled(rms_norm(branch.view(2, 64).view(4, 32), weight, 1e-6), x)
        return branch

    with torch.inference_mode():
        recording = Recording(function, Workspace())
        assert recording.complete
        torch.testing.assert_close(recording.result, function())
        x.copy_(torch.randn(4, 32))
        torch.testing.assert_close(recording.replay(), function())


def test_a_recording_knows_when_torch_computed_something() -> None:
    x = torch.randn(4, 32)

    def branch(function: Function) -> torch.Tensor:
        return add_scaled(x, function(x))

    with torch.inference_mode():
        for compute in COMPUTING:
            assert not Recording(partial(branch, compute), Workspace()).complete
        for look in LOOKING:
            assert Recording(partial(branch, look), Workspace()).complete


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    workspace = Workspace()
    first = workspace.empty((4, 32), torch.float32)
    address, view = first.data_ptr(), first[1:]
    del first
    assert workspace.empty((4, 32), torch.float32).data_ptr() != address
    del view
    assert workspace.empty((60,), torch.bfloat16).data_ptr() != address  # smaller ones have memory of their own
    taken = {workspace.empty((4, 32), torch.float32).data_ptr() for _ in range(2)}
    assert address in taken


def test_a_failure_ends_the_recording() -> None:
    def fails() -> torch.Tensor:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError), torch.inference_mode():  # noqa: PT011 whichever it is
            Recording(fails, Workspace())

"""Recorded kernel calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from quire.kernels import native
from quire.kernels.add import add_scaled, reference
from quire.kernels.linear import PackedBFloat16
from quire.kernels.capture import Recording, Workspace
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rows import take_rows

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
    x, weight, room = torch.randn(9, 32).bfloat16(), torch.randn(32).bfloat16(), torch.zeros(9, 64)
    head = PackedBFloat16(torch.randn(64, 32).bfloat16())

    def function(rows: int, out: torch.Tensor | None = None) -> torch.Tensor:
        branch = rms_norm(x[:rows], weight, 1e-6)
        for _ in range(5):  # what is dropped on the way makes room for the next
            branch = add_scaled(rms_norm(branch, weight, 1e-6), x[:rows])
        return head(branch, None, wide=True, out=out)

    with torch.inference_mode():
        recording = Recording(lambda: function(4, room[:4]), Workspace(9), (4,))
        assert recording.complete
        for rows in (4, 1, 9, 0):
            x.copy_(torch.randn(9, 32))
            recording.replay((rows,))
            torch.testing.assert_close(room[:rows], function(rows))


def test_each_call_is_replayed_for_as_many_rows_as_there_are_of_its_kind() -> None:
    x, weight, room = torch.randn(8, 32).bfloat16(), torch.randn(32).bfloat16(), torch.zeros(4, 64)
    head, chosen = PackedBFloat16(torch.randn(64, 32).bfloat16()), torch.tensor([5, 1, 7, 0])

    def function(rows: int, ends: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return head(take_rows(rms_norm(x[:rows], weight, 1e-6), chosen[:ends]), None, wide=True, out=out)

    with torch.inference_mode():
        recording = Recording(lambda: function(6, 2, room[:2]), Workspace(8), (6, 2))
        assert recording.complete
        for ends in (4, 0, 3):
            x.copy_(torch.randn(8, 32))
            recording.replay((8, ends))
            torch.testing.assert_close(room[:ends], function(8, ends))


def test_a_recording_knows_when_rows_are_not_those_of_the_step() -> None:
    x, weight = torch.randn(6, 32), torch.randn(32)
    with torch.inference_mode():
        assert not Recording(lambda: rms_norm(x[:3], weight, 1e-6), Workspace(), (6, 2)).complete


def test_a_recording_knows_when_torch_computed_something() -> None:
    x = torch.randn(4, 32)

    def branch(function: Function) -> torch.Tensor:
        return add_scaled(x, function(x))

    with torch.inference_mode():
        for compute in COMPUTING:
            assert not Recording(partial(branch, compute), Workspace(), (4,)).complete
        for look in LOOKING:
            assert Recording(partial(branch, look), Workspace(), (4,)).complete


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
            Recording(fails, Workspace(), (1,))

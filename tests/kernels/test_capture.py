"""Captured kernel calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.add_scaled import add_scaled, reference
from quire.kernels.capture import CapturedCalls, RowKind, Workspace, break_capture, set_row_kind
from quire.kernels.linear import PackedBFloat16
from quire.kernels.rms_norm import rms_norm
from quire.kernels.sampling import apply_token_bitmask, argmax
from quire.kernels.take_rows import take_rows

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels can be captured")


Function = Callable[[torch.Tensor], torch.Tensor]
VIEWS: list[Function] = [
    lambda x: x,
    lambda x: x.view(32, 4).view(4, 32),
    lambda x: x.float().contiguous(),
]
COMPUTATIONS: list[Function] = [
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
def test_add_scaled(dtype: torch.dtype, scale: float, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    torch.testing.assert_close(add_scaled(x, y, scale), reference(x, y, scale))


def test_replay_computes_with_the_present_contents_of_its_inputs() -> None:
    x, weight, logits = torch.randn(9, 32).bfloat16(), torch.randn(32).bfloat16(), torch.zeros(9, 64)
    head = PackedBFloat16(torch.randn(64, 32).bfloat16())

    def function(rows: int, out: torch.Tensor | None = None) -> torch.Tensor:
        branch = rms_norm(x[:rows], weight, 1e-6)
        for _ in range(5):  # each result reuses the memory of one that is no longer needed
            branch = add_scaled(rms_norm(branch, weight, 1e-6), x[:rows])
        return head(branch, None, out_dtype=torch.float32, out=out)

    with torch.inference_mode():
        captured = CapturedCalls(lambda: function(4, logits[:4]), Workspace(9), (4, 4))
        assert captured.complete
        for rows in (4, 1, 9, 0):
            x.copy_(torch.randn(9, 32))
            captured.replay((rows, rows))
            torch.testing.assert_close(logits[:rows], function(rows))


@pytest.mark.parametrize(("tokens", "ends"), [(6, 2), (4, 4)])
def test_each_call_is_replayed_with_the_count_of_its_row_kind(tokens: int, ends: int) -> None:
    """Also if both kinds have the same count while the calls are captured."""
    x, weight, logits = torch.randn(8, 32).bfloat16(), torch.randn(32).bfloat16(), torch.zeros(4, 64)
    head, indices = PackedBFloat16(torch.randn(64, 32).bfloat16()), torch.tensor([5, 1, 7, 0])

    def function(rows: int, ends: int, out: torch.Tensor | None = None) -> torch.Tensor:
        normed = rms_norm(x[:rows], weight, 1e-6)
        set_row_kind(RowKind.LOGITS)
        return head(take_rows(normed, indices[:ends]), None, out_dtype=torch.float32, out=out)

    with torch.inference_mode():
        counts = {RowKind.TOKENS: tokens, RowKind.LOGITS: ends}
        captured = CapturedCalls(lambda: function(tokens, ends, logits[:ends]), Workspace(8), counts)
        assert captured.complete
        for now in (4, 0, 3):
            x.copy_(torch.randn(8, 32))
            captured.replay((8, now))
            torch.testing.assert_close(logits[:now], function(8, now))


def test_a_capture_starts_with_tokens() -> None:
    x, weight = torch.randn(6, 32), torch.randn(32)
    set_row_kind(RowKind.LOGITS)  # without effect outside of a capture
    with torch.inference_mode():
        for _ in range(2):
            assert CapturedCalls(lambda: rms_norm(x, weight, 1e-6), Workspace(), (6, 2)).complete
            CapturedCalls(lambda: set_row_kind(RowKind.LOGITS), Workspace(), (6, 2))


def test_calls_for_other_numbers_of_rows_make_a_capture_incomplete() -> None:
    x, weight = torch.randn(6, 32), torch.randn(32)

    def norm(rows: int, kind: RowKind) -> None:
        set_row_kind(kind)
        rms_norm(x[:rows], weight, 1e-6)

    with torch.inference_mode():
        for rows, kind in ((3, RowKind.TOKENS), (2, RowKind.TOKENS), (6, RowKind.LOGITS)):
            assert not CapturedCalls(partial(norm, rows, kind), Workspace(), (6, 2)).complete


def test_calls_without_a_result_per_row_make_a_capture_incomplete() -> None:
    logits, mask = torch.randn(2, 32), np.zeros((2, 1), np.uint32)
    for call in (lambda: apply_token_bitmask(logits, mask, [(0, 0), (1, 1)]), lambda: argmax(logits)):
        assert not CapturedCalls(call, Workspace(), (2, 2)).complete


def test_replay_wants_a_count_of_each_kind() -> None:
    x, weight = torch.randn(6, 32), torch.randn(32)
    with torch.inference_mode():
        captured = CapturedCalls(lambda: rms_norm(x, weight, 1e-6), Workspace(), (6, 6))
    for counts in ((6,), (6, 6, 6), (6, -1)):
        with pytest.raises(ValueError, match="counts"):
            captured.replay(counts)


def test_a_capture_in_which_torch_computes_is_incomplete() -> None:
    x = torch.randn(4, 32)

    def branch(function: Function) -> torch.Tensor:
        return add_scaled(x, function(x))

    with torch.inference_mode():
        for compute in COMPUTATIONS:
            assert not CapturedCalls(partial(branch, compute), Workspace(), (4, 4)).complete
        for view in VIEWS:
            assert CapturedCalls(partial(branch, view), Workspace(), (4, 4)).complete


def test_memory_is_reused_when_no_view_of_it_is_left() -> None:
    workspace = Workspace()
    first = workspace.empty((4, 32), torch.float32)
    address, view = first.data_ptr(), first[1:]
    del first
    assert workspace.empty((4, 32), torch.float32).data_ptr() != address
    del view
    assert workspace.empty((60,), torch.bfloat16).data_ptr() != address  # other sizes have memory of their own
    taken = {workspace.empty((4, 32), torch.float32).data_ptr() for _ in range(2)}
    assert address in taken


def test_an_exception_ends_the_capture() -> None:
    def fails() -> torch.Tensor:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError), torch.inference_mode():  # noqa: PT011 whichever it is
            CapturedCalls(fails, Workspace(), (1, 1))


def test_a_call_of_something_else_than_kernels_is_not_replayed() -> None:
    """A collective changes a tensor without an operator of torch."""
    x, weight = torch.randn(6, 32), torch.randn(32)

    def function() -> None:
        rms_norm(x, weight, 1e-6)
        break_capture()

    assert not CapturedCalls(function, Workspace(), (6, 2)).complete
    assert CapturedCalls(lambda: rms_norm(x, weight, 1e-6), Workspace(), (6, 2)).complete

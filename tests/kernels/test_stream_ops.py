"""Compiled ops of several hidden states, copies and activations against their references in torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import native
from quire.kernels.copy_rows import contiguous_rows, dense_heads, join_columns, limit_ids, pad_rows
from quire.kernels.streams import add_to_streams, correct_streams, keep_largest, match_size, predict_streams
from quire.kernels.xielu import XieluNumbers, xielu

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="there are no compiled kernels")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states, computed = torch.randn(30, 4, 48).to(dtype), torch.randn(30, 48).to(dtype)
    logits, prediction, correction = torch.randn(30, 4), torch.randn(16, 4).to(dtype), torch.randn(4, 4).to(dtype)

    def run() -> list[torch.Tensor]:
        gates = torch.randn(30, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
        keep_largest(gates[:, :40], 0.7)
        corrected = correct_streams(states, computed, logits, correction, 1, 0.5)
        added = corrected.clone()
        add_to_streams(added, computed)
        predicted = predict_streams(states, logits, prediction, 0.5)
        return [predicted, corrected, added, match_size(states[:, 2], computed), gates]

    out = run()
    with native.disabled():
        expected = run()
    for actual, other in zip(out, expected, strict=True):
        torch.testing.assert_close(actual, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies(dtype: torch.dtype) -> None:
    x = torch.randn(20, 6, 10).to(dtype)
    parts = [x[:, 1], x[:, 3, 2:], x[:, 5, :3]]
    assert torch.equal(join_columns(parts), torch.cat(parts, 1))
    assert torch.equal(contiguous_rows(x[:, 2]), x[:, 2])
    assert torch.equal(dense_heads(x[..., 2:7]), x[..., 2:7].flatten(1))
    padded = pad_rows(x[:, ::2], 16)
    assert torch.equal(padded[..., :10], x[:, ::2])
    assert not padded[..., 10:].any()
    assert limit_ids(torch.tensor([3, 9, 10, 0, 11]), 10).tolist() == [3, 9, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu(dtype: torch.dtype) -> None:
    """Near 0 too, where the exponential minus 1 has few bits."""
    numbers = XieluNumbers(0.8, 1.3, 0.5, -1e-6)
    x = torch.cat([torch.linspace(-90, 40, 160), torch.linspace(-1e-3, 1e-3, 160), torch.linspace(-1, 0, 160)])
    x = x.view(10, 48).to(dtype)
    out = xielu(x, numbers)
    with native.disabled():
        torch.testing.assert_close(out, xielu(x, numbers))

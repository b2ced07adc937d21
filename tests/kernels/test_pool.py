"""Kernels share their work with whatever threads come."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.kernels import native
from quire.kernels.linear import PackedBFloat16

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="torch's threads run the references")


def test_callers_on_several_threads_do_not_meet() -> None:
    panels = PackedBFloat16(torch.randn(2048, 512).bfloat16())
    inputs = [torch.randn(3, 512).bfloat16() for _ in range(4)]
    expected = [panels(x, None) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(panels(inputs[index], None), expected[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    panels, x = PackedBFloat16(torch.randn(4096, 256).bfloat16()), torch.randn(40, 256).bfloat16()
    expected = panels(x, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(panels(x, None), expected) for _ in range(100))
    finally:
        torch.set_num_threads(before)

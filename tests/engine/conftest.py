"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch and kernels compute in one thread: in models of this size, threads only wait for each other.

    Modules whose tests need several have a fixture of this name.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.threads import threads


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch and kernels compute in one thread: in models of this size, threads only wait for each other. Tests that
    are about several threads ask for them: see `threads`.
    """
    with threads(1):
        yield

"""Workers start here as they do outside of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.workers import process

_CREATE = process._create


@pytest.fixture(autouse=True)
def started_workers() -> Iterator[None]:
    """Start each worker process by its own command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_create", _CREATE)
        yield

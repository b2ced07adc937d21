"""Workers start here as they do in a server."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def started(started_workers: None) -> None:
    """All tests of this folder start workers by their own command."""

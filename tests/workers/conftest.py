"""Worker processes are started as users' servers start them: these tests are about them."""

from __future__ import annotations

import pytest

from tests.support.forked_workers import start_interpreter


@pytest.fixture(autouse=True)
def workers_in_new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.workers.process._create", start_interpreter)

"""Puts the engine of a test to sleep and wakes it."""

from __future__ import annotations

from quire.engine.client.protocol import MemoryTag, Sleep, SleepLevel, SleepState, Wake
from tests.support.engine import Engine

ALL: frozenset[MemoryTag] = frozenset(("weights", "kv_cache"))
AWAKE = SleepState(frozenset())


def answer(engine: Engine, message: Sleep | Wake) -> SleepState:
    """The core's answer to a message."""
    engine.core._handle(message)
    (state,) = [sent for sent in engine.channel.sent if isinstance(sent, SleepState)]
    engine.channel.sent.clear()
    return state


def sleep(engine: Engine, level: SleepLevel) -> None:
    """Put an engine to sleep."""
    assert answer(engine, Sleep(level)) == SleepState(ALL)

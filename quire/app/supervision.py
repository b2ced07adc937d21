"""What happens when an engine dies: the server ends, or the engine is started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import EngineDead
from quire.serving.models import ServerState

logger = logging.getLogger("quire")
DeathPolicy = Literal["exit", "restart"]
_ATTEMPTS = 5
_FIRST_DELAY = 1.0  # seconds before the first restart; doubles with each attempt
_STABLE_AFTER = 300.0  # seconds; an engine that has run for so long starts again with the first attempt


class Restartable(Protocol):
    """An engine: its client, which outlives its cores, and a way to start another core."""

    @property
    def client(self) -> EngineClient:
        """The client of its core."""

    async def restart(self) -> object:
        """Start another core in place of one that has died; raises EngineDead if it cannot be loaded."""


async def supervise(
    engine: Restartable, policy: Callable[[], DeathPolicy], state: ServerState, give_up: Callable[[str], None]
) -> None:
    """Wait for an engine to die and restart it, until it cannot be restarted; then call `give_up` with the reason.

    Between two attempts is a growing delay, so that an engine that dies on start does not keep the machine busy.
    While the server drains, nothing is restarted: it ends the engines itself. `policy`: what to do now.
    """
    attempt = 0
    while True:
        started = time.monotonic()
        reason = await _death_of(engine)
        if time.monotonic() - started > _STABLE_AFTER:
            attempt = 0
        restarted = False
        while policy() == "restart" and attempt < _ATTEMPTS and not restarted and not state.draining:
            attempt += 1
            try:
                await _restart(engine, reason, attempt)
                restarted = True
            except EngineDead as error:
                reason = str(error)
        if not restarted:
            if not state.draining:
                give_up(reason)
            return


async def _death_of(engine: Restartable) -> str:
    try:
        await engine.client.wait_until_dead()
    except EngineDead as error:
        return str(error)


async def _restart(engine: Restartable, reason: str, attempt: int) -> None:
    """Start an engine again.

    Raises:
        EngineDead: it could not be loaded, or died again.
    """
    text = f"{reason.rstrip('.')}. It is being restarted (attempt {attempt} of {_ATTEMPTS})."
    engine.client.announce_restart(text)
    logger.warning("%s", text)
    await asyncio.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
    started = time.monotonic()
    await engine.restart()
    logger.info("the engine was restarted in %.1f s", time.monotonic() - started)

"""`quire serve --headless`: a node that runs ranks for the server on node 0."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import ExitStack
from types import FrameType

from quire.app.engines import core_config
from quire.app.exits import end_process, handling_signals
from quire.app.models import ModelSource
from quire.config.commands import Serve
from quire.engine.build.nodes import run_node
from quire.engine.execution.ranks.errors import NodesMissing, RankDied
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.errors import ModelError

logger = logging.getLogger("quire")
_GRACE = 5.0  # seconds from the abort of requests until a server has ended


def run_headless(settings: Serve, source: ModelSource, configs: ConfigReader) -> int:
    """Run the ranks of this node until node 0 ends; returns the exit status."""
    stop = _Stop(settings.shutdown_timeout + _GRACE)
    with ExitStack() as stack:
        try:
            config = core_config(source, configs.next(), settings)
            # Until it has joined nothing depends on this node, and a signal ends it at once.
            run_node(config, stop.is_due, lambda: stack.enter_context(handling_signals(stop.handle)))
        except (ModelError, NodesMissing, RankDied) as error:
            logger.error("node %d ends: %s", settings.node_rank, error)
            end_process(1)
        logger.info("node %d ends", settings.node_rank)
        end_process(0)  # as a server does: Python's own exit takes seconds with torch


class _Stop:
    """Ends this node some time after a signal: the server needs its ranks to finish its requests."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: that the server may take."""
        self._seconds = seconds
        self._latest: float | None = None

    def handle(self, number: int, _: FrameType | None) -> None:
        """Note a first signal; end the process on a second one."""
        if self._latest is not None:
            end_process(1)
        self._latest = time.monotonic() + self._seconds
        name = signal.Signals(number).name
        logger.info("%s: this node ends with node 0, or in %g s; a second signal ends it now", name, self._seconds)

    def is_due(self) -> bool:
        """Whether node 0 has had its time."""
        return self._latest is not None and time.monotonic() > self._latest

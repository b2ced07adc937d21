"""Heartbeat: detects that a core does not answer."""

from __future__ import annotations

import itertools
import time

from quire.engine.client.protocol import Ping
from quire.engine.client.transport import ClientChannel


class Heartbeat:
    """The pings that are sent to a core, at most one at a time, and its answers.

    Attributes:
        last_message: monotonic seconds at which the core's last message arrived.
    """

    def __init__(self) -> None:
        self.last_message = time.monotonic()
        self._serials = itertools.count()
        self._unanswered: float | None = None  # when the ping was sent that has no answer yet

    def ping(self, channel: ClientChannel) -> None:
        """Send a ping, unless the last one has no answer.

        Raises:
            EngineDead: the core cannot be reached.
        """
        if self._unanswered is None:
            self._unanswered = time.monotonic()
            channel.send(Ping(next(self._serials)))

    def answered(self) -> None:
        """The core has answered, or has been replaced."""
        self._unanswered = None

    def unresponsive_seconds(self) -> float:
        """Seconds since the last message of a core that has not answered a ping; 0 if no ping is unanswered."""
        return 0.0 if self._unanswered is None else time.monotonic() - max(self._unanswered, self.last_message)

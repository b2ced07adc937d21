"""Ranks in threads of the test's process."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

from quire.engine.execution.ranks.workers import RankEntry
from quire.engine.models.distributed.rendezvous import Rendezvous


class ThreadRank(threading.Thread):
    """Run a rank in a thread, which ends by a message, or with an error when the others have ended."""

    exitcode = None

    def __init__(self, entry: RankEntry, rank: int, rendezvous: Rendezvous, connection: Connection) -> None:
        super().__init__(target=entry, args=(rank, rendezvous, connection), name=f"rank-{rank}", daemon=True)
        self.start()

    def kill(self) -> None:
        """A thread cannot be ended by force."""

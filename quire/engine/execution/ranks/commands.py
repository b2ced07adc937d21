"""RankCommands: commands of an operator, which workers run between two steps as the core does."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.execution.ranks.errors import RankRefused
from quire.engine.execution.ranks.messages import CommandEnded, RankCommand
from quire.engine.execution.ranks.workers import Workers


class RankCommands:
    """Send commands to all workers. Between `send` and `wait` the core runs its own part."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def send(self, command: RankCommand) -> None:
        """Let all workers run a command, after the steps that they were told to run."""
        self._workers.send(command)

    def wait(self, poll: Callable[[], None]) -> None:
        """Wait until all workers have run it; `poll` is called meanwhile.

        Raises:
            RankRefused: a worker could not.
            RankDied: a worker has ended.
        """
        replies = self._workers.collect(CommandEnded, poll)
        errors = [reply.error for reply in replies if reply.error is not None]
        if errors:
            raise RankRefused("; ".join(errors))

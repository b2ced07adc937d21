"""Profiling: profiles of an engine's steps on all of its ranks, each of which ends by itself at the latest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from quire.engine.client.protocol import StartProfile, StopProfile
from quire.engine.execution.profiler import ProfilerError, StepProfiler
from quire.engine.execution.ranks.commands import RankCommands
from quire.engine.execution.ranks.errors import RankRefused
from quire.engine.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)
Poll = Callable[[], None]


class Profiling:
    """Start, bound and end profiles.

    Attributes:
        ends_at: monotonic seconds at which the profile ends by itself; None: there is none.
    """

    def __init__(self, profiler: StepProfiler, ranks: RankCommands | None = None) -> None:
        """`profiler`: that of this rank; `ranks`: the others; None: there are none."""
        self._profiler = profiler
        self._ranks = ranks
        self._skip = 0  # steps before the first that is recorded
        self._left: int | None = None  # steps that are still recorded; None: there is no limit
        self._was_limited = False  # the last profile has ended by itself
        self.ends_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the profile has reached a limit, so that it is to be stopped."""
        return self.ends_at is not None and (self._left == 0 or time.monotonic() >= self.ends_at)

    def start(self, poll: Poll) -> None:
        """Begin a profile.

        Raises:
            ProfilerError: there is one already, or no config.
        """
        config = self._profiler.config
        if config is None:
            raise ProfilerError("The server was started without --profiler-config, which profiles need.")
        if self.ends_at is not None:
            raise ProfilerError("A profile is being recorded already: POST /stop_profile ends it.")
        self._skip, self._left = config.delay_iterations, config.max_iterations or None
        if not self._skip:
            self._record(poll)
        self._was_limited = False
        self.ends_at = time.monotonic() + config.max_seconds

    def stop(self, poll: Poll, *, by_limit: bool = False) -> None:
        """End a profile, and write it. After one that has ended by itself nothing happens.

        Raises:
            ProfilerError: there is none, or it cannot be written.
        """
        if self.ends_at is None and self._was_limited:
            self._was_limited = False
            return
        if self.ends_at is None:
            raise ProfilerError("No profile is being recorded: POST /start_profile begins one.")
        self.ends_at, self._was_limited = None, by_limit
        if self._profiler.is_recording:
            self._write(poll)

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """A context in which a step is submitted."""
        if self.ends_at is None:
            return nullcontext()
        if self._skip:
            self._skip -= 1
            return nullcontext()
        if not self._profiler.is_recording:
            try:
                self._record(_do_not_poll)
            except ProfilerError as error:  # the step must run all the same
                self.ends_at = None
                logger.error("the profile was given up: %s", error)
                return nullcontext()
        if self._left is not None:
            self._left -= 1
        return self._profiler.step(plan)

    def close(self) -> None:
        """Give up the profile."""
        self.ends_at = None
        self._profiler.discard()

    def _record(self, poll: Poll) -> None:
        """Record on all ranks, or on none: a profile that nobody ends would take memory without a limit."""
        self._profiler.start()
        if self._ranks is None:
            return
        try:
            self._ranks.send(StartProfile())
            self._wait(poll)
        except ProfilerError:
            self._profiler.discard()
            self._ranks.send(StopProfile())
            self._wait(poll)
            raise

    def _write(self, poll: Poll) -> None:
        """End the profiles of all ranks, which write them at the same time."""
        if self._ranks is not None:
            self._ranks.send(StopProfile())
        try:
            self._profiler.stop()
        finally:
            if self._ranks is not None:
                self._wait(poll)

    def _wait(self, poll: Poll) -> None:
        assert self._ranks is not None
        try:
            self._ranks.wait(poll)
        except RankRefused as error:
            raise ProfilerError(str(error)) from error


def _do_not_poll() -> None:
    pass

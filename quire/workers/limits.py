"""The limits of a worker process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one job.

    Attributes:
        memory: bytes of private writable memory (RLIMIT_DATA) that a worker may allocate beyond what it has after its
            start. Mapped files and libraries do not count. Not limited on systems other than Linux.
        seconds: processor time of one job. It is killed at the latest after ten times as many seconds of
            real time.
        stack: bytes of the stack that jobs run on, of Python and of native code.
    """

    memory: int
    seconds: float
    stack: int

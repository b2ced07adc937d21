"""Errors of worker pools.

WorkerError
├── QueueFull    the job was not accepted
│   └── ShareExceeded  because of what its tenant holds already
├── JobTimedOut  the job was killed: it took too long
└── JobKilled    the job's process has ended: memory, stack or a crash
"""

from __future__ import annotations

from enum import Enum


class WorkerError(Exception):
    """Base class; itself: the pool is closed, or a worker process cannot be started."""


class QueueFull(WorkerError):
    """Too many jobs are waiting, or this job has waited for too long; a later attempt may succeed.

    Attributes:
        retry_after: seconds after which it may.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShareExceeded(QueueFull):
    """The tenant has its share of the places, or of what jobs wait for, while there is room for others."""


class JobTimedOut(WorkerError):
    """The job took longer than `WorkerLimits.seconds`.

    Attributes:
        stalled: it did not get as much processor time; it may do so on a machine that is less busy.
    """

    def __init__(self, message: str, stalled: bool = False) -> None:
        super().__init__(message)
        self.stalled = stalled


class Cause(Enum):
    """Why a worker process has ended during a job."""

    MEMORY = "it needs too much memory"
    STACK = "it is nested too deeply"
    CRASH = "its process has crashed"
    KILLED = "its worker process was killed, also when it was tried again; the machine may be out of memory"


class JobKilled(WorkerError):
    """The worker process has ended during the job.

    Attributes:
        cause: the cause, as far as the exit status tells.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause

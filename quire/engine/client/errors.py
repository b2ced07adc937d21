"""Errors of the client side of the engine.

EngineError
├── EngineDead        the core has stopped; every open and later request fails
├── FrontEndClosed    the front end has closed its socket
├── EngineOverloaded  the queue is full
│   └── TenantOverloaded  because of other requests of the same tenant
├── EngineAsleep      the engine sleeps, or is about to
├── SleepFailed       the engine could not fall asleep or wake up
├── DrainTimedOut     requests of a replica have not ended in time
├── CommandRefused    the state of the engine does not allow what an operator asks for
├── RequestAborted    an operator has aborted this request
├── RequestRefused    the core does not accept this request
├── RequestFailed     the engine failed while it ran this request; others continue
├── BlocksNotRead     another engine did not send the KV blocks of this request's prompt
├── DeadlineExceeded  this request reached its timeout
└── MalformedMessage  received frames are not a message
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the errors that the client side of an engine raises."""


class EngineDead(EngineError):
    """The engine core has stopped; the message gives the reason.

    Attributes:
        retry_after: seconds after which this server, or another one, is likely to accept requests again.
    """

    retry_after = 5


class FrontEndClosed(EngineError):
    """The front end has closed its socket, so that the core cannot send any more."""


class EngineOverloaded(EngineError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which capacity is likely to be free.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantOverloaded(EngineOverloaded):
    """A tenant has its share of the queue, in which there is room for others."""


class EngineAsleep(EngineError):
    """The engine sleeps, or is about to, so that no request can run; the message says how to wake it."""


class SleepFailed(EngineError):
    """The engine could not fall asleep or wake up; the message has the reason. It can be asked again."""


class CommandRefused(EngineError):
    """The state of the engine does not allow what an operator asks for; the message has the reason."""


class DrainTimedOut(EngineError):
    """Requests of a replica that was to be removed have not ended in time; it goes on."""


class RequestAborted(EngineError):
    """An operator has aborted this request; the message says by what."""


class RequestRefused(EngineError):
    """The core refuses this request, because it is invalid; the message has the reason."""


class RequestFailed(EngineError):
    """The engine failed while it ran this request; other requests continue."""


class BlocksNotRead(EngineError):
    """Another engine did not send the KV blocks of this request's prompt; other requests continue."""


class DeadlineExceeded(EngineError):
    """The request reached its timeout and was aborted."""


class MalformedMessage(EngineError):
    """Received frames are not a message of the protocol."""

"""What can go wrong at the engine's door.

EngineError
├── EngineDead        the core ended; every open and later request fails
├── EngineOverloaded  more sequences than batch and queue take
├── RequestFailed     the core could not go on with this one request
└── MalformedMessage  frames that are no message
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the errors an engine raises towards its users."""


class EngineDead(EngineError):
    """The engine core has ended; the text says why."""


class EngineOverloaded(EngineError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(EngineError):
    """The engine gave up one request; others go on."""


class DeadlineExceeded(EngineError):
    """A request took longer than it may; it was ended."""


class MalformedMessage(EngineError):
    """Received frames are not a message of the protocol."""

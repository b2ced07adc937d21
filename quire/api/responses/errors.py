"""Errors of stored responses.

StoreFailed              503 with Retry-After
├── StoreBlocked         503; others would wait as well
├── StoreShareExceeded   429; the store works
└── TooLargeToStore      413; the store works
NoSuchResponse           404
"""

from __future__ import annotations

from quire.protocol.errors import NotFound, TooLarge, TooManyRequests, Unavailable

_RETRY_SECONDS = 5  # about as often as a store that cannot be used is checked
_SHOWN = 100  # characters of an id in a message


class StoreFailed(Unavailable):
    """The database cannot be used. The message is for clients: it has no SQL, no path and no URL.

    Attributes:
        detail: error text of the database, for the log.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, headers={"Retry-After": str(_RETRY_SECONDS)})
        self.detail = detail


class StoreBlocked(StoreFailed):
    """The database kept the operation waiting for too long."""


class StoreShareExceeded(StoreFailed):
    """The client has its share of the operations that may wait."""

    status = TooManyRequests.status
    kind = TooManyRequests.kind


class TooLargeToStore(StoreFailed):
    """The response is larger than the store may become."""

    status = TooLarge.status
    kind = TooLarge.kind

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers.clear()  # trying again does not help


class NoSuchResponse(NotFound):
    """There is no such response."""

    def __init__(self, response_id: str, param: str | None = None, *, continued_by: str | None = None) -> None:
        """`continued_by`: the response whose conversation lacks it."""
        part = "" if continued_by is None else f", an earlier part of the conversation of '{continued_by[:_SHOWN]}',"
        super().__init__(
            f"Response with id '{response_id[:_SHOWN]}'{part} not found: it was never stored, was deleted, has "
            "expired, or was removed because the store was full.",
            param,
        )

"""What may go wrong with stored responses."""

from __future__ import annotations

from quire.api.http.errors import NotFound, Unavailable


class StoreFailed(Unavailable):
    """The database cannot be used just now."""


class NoSuchResponse(NotFound):
    """It never was, was not to be kept, was deleted or has expired."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", param)

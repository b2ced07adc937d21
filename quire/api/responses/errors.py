"""Errors of stored responses."""

from __future__ import annotations

from quire.api.http.errors import NotFound, Unavailable


class StoreFailed(Unavailable):
    """The database cannot be used."""


class NoSuchResponse(NotFound):
    """There is no such response: it was never stored, was deleted, or has expired."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", param)

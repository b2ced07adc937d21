"""Errors of a session.

EventError            one client event is refused; the session continues
SessionEnded           the session ends; the client gets the reason
"""

from __future__ import annotations

from quire.protocol.errors import shorten

_MAX_MESSAGE = 1000  # characters of an error text


class EventError(Exception):
    """A client event that cannot be carried out.

    Attributes:
        code: a short name that programs compare.
        param: path of the field that caused it, if one did.
        event_id: the client's own id of the event, if it has one.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(shorten(message, _MAX_MESSAGE))
        self.code = code
        self.param = param
        self.event_id: str | None = None

    @property
    def message(self) -> str:
        """The text, without lone surrogates."""
        return str(self).encode(errors="replace").decode()


class SessionEnded(Exception):
    """The session ends.

    Attributes:
        code: code of the WebSocket's close frame; None if the client has gone.
        reason: text for the client; empty if the client ended the session.
        name: `code` of an error event that goes before the close frame; None: no such event.
    """

    def __init__(self, code: int | None, reason: str = "", name: str | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.name = name

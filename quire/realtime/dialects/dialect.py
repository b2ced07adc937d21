"""The interface of dialects, and the values that sessions pass to them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from quire.realtime.client_events import ClientEvent
from quire.realtime.errors import EventError
from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript
from quire.speech.types import TokenLogprob

Body = dict[str, Any]  # a server event


@dataclass(slots=True)
class SessionInfo:
    """Id and settings of a session.

    Attributes:
        expires_at: Unix time at which it ends; None: never.
    """

    settings: SessionSettings
    expires_at: int | None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class Dialect(Protocol):
    """One wire format. Methods return the server events to send, in order.

    Attributes:
        commits_end_utterances: a commit ends an utterance; otherwise it begins or ends a generation.
        defaults: settings of a new session.
    """

    commits_end_utterances: ClassVar[bool]
    defaults: ClassVar[SessionSettings]

    def updated_settings(self, event: ClientEvent, settings: SessionSettings) -> SessionSettings:
        """The settings after an update.

        Raises:
            EventError: the update is not valid.
        """

    def created(self, session: SessionInfo) -> list[Body]: ...

    def updated(self, session: SessionInfo) -> list[Body]: ...

    def error(self, error: EventError) -> list[Body]: ...

    def session_error(self, code: str, message: str) -> list[Body]:
        """The events before the session ends with this error."""

    def speech_started(self, item: str, milliseconds: int) -> list[Body]: ...

    def speech_stopped(self, item: str, milliseconds: int) -> list[Body]: ...

    def committed(self, item: str, previous: str | None) -> list[Body]: ...

    def cleared(self) -> list[Body]: ...

    def delta(self, item: str, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Body]:
        """Events for more text; `logprobs` of its tokens, or None if they were not requested."""

    def completed(self, item: str, transcript: Transcript) -> list[Body]: ...

    def failed(self, item: str, code: str, message: str, *, is_server_error: bool) -> list[Body]: ...

    def generated(self) -> list[Body]:
        """The events at the end of a generation (vLLM)."""

    def drained(self) -> list[Body]:
        """The events before the server shuts down, after those of all utterances."""

"""Finds the dialect of a client: guessed from its request, determined by its first event."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.datastructures import Headers, QueryParams

from quire.realtime.client_events import ClientEvent, Commit, SessionUpdate, TranscriptionSessionUpdate
from quire.realtime.dialects.dialect import Dialect
from quire.realtime.dialects.openai import OpenAI, OpenAIBeta
from quire.realtime.dialects.vllm import Vllm

_BETA_PROTOCOL = "openai-beta.realtime-v1"


class DialectChoice:
    """The dialect of a session.

    Attributes:
        dialect: the current one; a guess until the first event.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._certain = False

    def decide(self, event: ClientEvent) -> bool:
        """Determine the dialect by the first event of a client; returns whether it has changed."""
        if self._certain:
            return False
        self._certain = True
        before = self.dialect
        shown = _shown_by(event)
        if shown is not None and type(shown) is not type(before):
            self.dialect = shown
        return self.dialect is not before


def guess(headers: Headers, query: QueryParams, subprotocols: list[str]) -> Dialect:
    """The dialect that the headers and query of an upgrade request suggest."""
    if "realtime=v1" in headers.get("openai-beta", "") or _BETA_PROTOCOL in subprotocols:
        return OpenAIBeta(of_transcription=query.get("intent") == "transcription")
    return OpenAI() if "model" in query or "intent" in query else Vllm()


def _shown_by(event: ClientEvent) -> Dialect | None:
    """The dialect of an event; None if several dialects have it."""
    match event:
        case TranscriptionSessionUpdate():
            return OpenAIBeta(of_transcription=True)
        case SessionUpdate(session=msgspec.UnsetType(), model=model):
            return None if model is UNSET else Vllm()
        case SessionUpdate(session=msgspec.Raw() as session):
            return OpenAIBeta(of_transcription=False) if _is_flat(session) else OpenAI()
        case Commit(final=final) if final is not UNSET:
            return Vllm()
        case _:
            return None


class _Shape(msgspec.Struct):
    type: msgspec.Raw | msgspec.UnsetType = UNSET
    audio: msgspec.Raw | msgspec.UnsetType = UNSET


def _is_flat(session: msgspec.Raw) -> bool:
    """Return whether a session has the form of the beta. False for anything but an object."""
    try:
        shape = msgspec.json.decode(session, type=_Shape)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return shape.type is UNSET and shape.audio is UNSET

"""Which dialect a client speaks: a guess from its request, made certain by its first event."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.datastructures import Headers, QueryParams

from quire.realtime.client_events import ClientEvent, Commit, SessionUpdate, TranscriptionSessionUpdate
from quire.realtime.dialects.dialect import Dialect
from quire.realtime.dialects.openai import OpenAI, OpenAIBeta
from quire.realtime.dialects.vllm import Vllm

_BETA_PROTOCOL = "openai-beta.realtime-v1"


class Choice:
    """The dialect of a session.

    Attributes:
        dialect: the one that is spoken, as far as is known.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._certain = False

    def decide(self, event: ClientEvent) -> bool:
        """Look at the first event of a client; returns whether the dialect is another one now."""
        if self._certain:
            return False
        self._certain = True
        before = self.dialect
        shown = _shown_by(event)
        if shown is not None and type(shown) is not type(before):
            self.dialect = shown
        return self.dialect is not before


def guess(headers: Headers, query: QueryParams, subprotocols: list[str]) -> Dialect:
    """The dialect that a request for an upgrade speaks of."""
    if "realtime=v1" in headers.get("openai-beta", "") or _BETA_PROTOCOL in subprotocols:
        return OpenAIBeta(of_transcription=query.get("intent") == "transcription")
    return OpenAI() if "model" in query or "intent" in query else Vllm()


def _shown_by(event: ClientEvent) -> Dialect | None:
    """The dialect that an event shows; None if it is the same in several."""
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
    """Whether a session has the form of the beta. One that is no object at all has no form."""
    try:
        shape = msgspec.json.decode(session, type=_Shape)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return shape.type is UNSET and shape.audio is UNSET

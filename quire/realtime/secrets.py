"""Client secrets: keys for browsers, which expire and can only open realtime sessions."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Literal

import msgspec

from quire.realtime.errors import EventError

PREFIX = "ek_"
CLIENT_SECRET = "quire.client_secret"  # noqa: S105 a key of scopes: the `Secret` of a handshake that has a valid one
SessionForm = Literal["ga", "beta", "beta transcription"]  # the API whose sessions a secret opens
_MAX_SESSION = 8192  # bytes of a session's JSON: the secret travels in a header
_DIGEST = hashlib.sha256().digest_size


class Secret(msgspec.Struct, frozen=True, array_like=True):
    """Contents of a client secret.

    Attributes:
        expires_at: Unix time.
        owner: name of the API key with which it was created; None: the server needs none.
        session: JSON of the session's settings.
        form: the API whose form they have.
        nonce: makes secrets differ.
    """

    expires_at: int
    owner: str | None
    session: bytes
    form: SessionForm
    nonce: bytes


def new_key() -> bytes:
    """Return a key that signs secrets."""
    return secrets.token_bytes(32)


class ClientSecrets:
    """Make and check secrets. They are signed, so that nothing is kept for them; no other server accepts them."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key`: signs them, if several processes accept them; see `new_key`."""
        self._key = key or new_key()

    def make(self, session: bytes, *, seconds: int, owner: str | None, form: SessionForm) -> tuple[str, Secret]:
        """A secret as text, and its contents.

        Raises:
            EventError: the session's settings are too long.
        """
        if len(session) > _MAX_SESSION:
            raise EventError(
                f"The `session` of a client secret may have {_MAX_SESSION} bytes, this one has {len(session)}.",
                "invalid_value",
                "session",
            )
        secret = Secret(int(time.time()) + seconds, owner, session, form, secrets.token_bytes(12))
        content = msgspec.msgpack.encode(secret)
        return PREFIX + _encode(self._signature(content) + content), secret

    def read(self, text: str) -> Secret | None:
        """The contents of a secret; None if it was not made by this server, or has expired."""
        if not text.startswith(PREFIX):
            return None
        encoded = text.removeprefix(PREFIX)
        try:
            signed = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        except ValueError:
            return None
        if _encode(signed) != encoded:  # the decoder skips other characters, and the last one's unused bits
            return None
        signature = signed[:_DIGEST]
        content = signed[_DIGEST:]
        if not hmac.compare_digest(signature, self._signature(content)):
            return None
        secret = msgspec.msgpack.decode(content, type=Secret)
        return secret if secret.expires_at > time.time() else None

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)


def _encode(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")

"""Security: how two engines know each other before blocks are sent, and whether others can read what is sent."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config.kv_transfer import ConnectorConfig

_SHORTEST_SECRET = 16  # bytes
_NONCE = 32  # bytes
Side = Literal["decoder", "prefiller"]


class UnusableSecurity(Exception):
    """A file of --kv-transfer-config cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Security:
    """What both ends of a connection have.

    Attributes:
        secret: which only they know; empty: a peer needs none.
        accepting: TLS of a prefiller; None: it has none.
        connecting: TLS of a decoder; None: it has none.
    """

    secret: bytes = b""
    accepting: ssl.SSLContext | None = None
    connecting: ssl.SSLContext | None = None

    @classmethod
    def of(cls, config: ConnectorConfig) -> Security:
        """Read the files that a configuration names.

        Raises:
            UnusableSecurity: one cannot be used.
        """
        return cls(
            b"" if config.secret_file is None else _secret(config.secret_file),
            None if config.tls_certfile is None else _accepting(config.tls_certfile, config.tls_keyfile),
            None if config.tls_ca_file is None else _connecting(config.tls_ca_file),
        )

    def challenge(self) -> bytes:
        """Return what a peer is to answer with a proof, another one for each connection; empty: no proof is needed."""
        return secrets.token_bytes(_NONCE) if self.secret else b""

    def proof(self, side: Side, prefiller: bytes, decoder: bytes) -> bytes:
        """Return what proves that a side knows the secret, without telling it.

        `prefiller`, `decoder`: their challenges. Both are in each proof, and the side, so that none can be used twice.
        """
        if not self.secret:
            return b""
        parts = (side.encode(), prefiller, decoder)
        return hmac.digest(self.secret, b"".join(hashlib.sha256(part).digest() for part in parts), "sha256")

    def accepts(self, proof: bytes, side: Side, prefiller: bytes, decoder: bytes) -> bool:
        """Return whether a peer has proved what it has to."""
        return hmac.compare_digest(proof, self.proof(side, prefiller, decoder))


NO_SECURITY = Security()


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UnusableSecurity(f"secret_file: {path} cannot be read: {error.strerror}") from error
    if len(secret) < _SHORTEST_SECRET:
        raise UnusableSecurity(f"secret_file: {path} has {len(secret)} bytes, fewer than {_SHORTEST_SECRET}")
    return secret


def _accepting(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise UnusableSecurity(f"tls_certfile, tls_keyfile: {certificate} cannot be used: {error}") from error
    return context


def _no_password() -> str:
    """Refuse a key with a password: OpenSSL would ask for it at the terminal."""
    raise ValueError("its key has a password, which is not supported")


def _connecting(authorities: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authorities))
    except OSError as error:
        raise UnusableSecurity(f"tls_ca_file: {authorities} cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context

"""`quire key`: a new API key, and its entry for --api-key-file."""

from __future__ import annotations

import hashlib
import secrets
import sys

from quire.config.command import ConfigError
from quire.config.commands import Key
from quire.config.key_file import KeyFileError, check_name, table_of

_PREFIX = "quire-"  # by which scanners of repositories recognise a key that was committed
_BYTES = 32  # a SHA-256 of so many random bytes cannot be inverted, so no slow hash is needed


def run(settings: Key) -> int:
    """Print the entry to standard output, and the key to standard error; returns the exit status."""
    try:
        check_name(settings.client)
    except KeyFileError as error:
        raise ConfigError(f"quire key: {error}") from error
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    limits = {
        field: value
        for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
        if (value := getattr(settings, field)) is not None
    }
    rights = {"admin": True} if settings.admin else {}
    digest = hashlib.sha256(key.encode()).hexdigest()
    print(table_of(settings.client, {"sha256": digest, **rights, **limits}))
    print(f"The key of {settings.client}, which is not shown again: {key}", file=sys.stderr)
    return 0

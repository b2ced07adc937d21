"""Files of API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quire.config.key_file import table_of


def sha256_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write_keys(path: Path, **entries: dict[str, Any]) -> Path:
    """A file with an entry for each client, whose key is `key-NAME`."""
    tables = [table_of(name, {"sha256": sha256_of(f"key-{name}"), **entry}) for name, entry in entries.items()]
    path.write_text("\n".join(tables))
    return path


def bearer(name: str) -> dict[str, str]:
    """The headers of a client in such a file."""
    return {"authorization": f"Bearer key-{name}"}

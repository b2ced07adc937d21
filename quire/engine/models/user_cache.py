"""Directories in the user's cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from quire.engine.models.errors import BrokenFolder


def user_cache(name: str) -> Path:
    """A directory in the user's cache; among the system's temporary files if the user's is not writable.

    Raises:
        BrokenFolder: neither is writable.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for parent in (base / "quire", Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"):
        cache = parent / name
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(cache, os.W_OK) and cache.stat().st_uid == os.getuid():
            return cache
    raise BrokenFolder(f"no directory is writable for what is kept of models: {base / 'quire'}")

"""Looks at the files that settings name before a command begins its work."""

from __future__ import annotations

import os
from pathlib import Path

from quire.config.command import Command, ConfigError


def check_readable(settings: Command, field: str, encoding: str = "latin-1") -> None:
    """Make sure that a setting's file can be read; latin-1 is content with any bytes.

    Raises:
        ConfigError: it cannot.
    """
    path: Path | None = getattr(settings, field)
    if path is None:
        return
    try:
        path.read_text(encoding)
    except (OSError, UnicodeError) as error:
        raise file_error(settings, field, "a readable file", _reason(error)) from error


def check_writable(settings: Command, field: str) -> None:
    """Make sure that a setting's file can be written, without making it.

    Raises:
        ConfigError: it cannot.
    """
    path: Path | None = getattr(settings, field)
    if path is None:
        return
    if path.is_dir():
        raise file_error(settings, field, "a file to write", "it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise file_error(settings, field, "a file to write", "it cannot be written there")


def file_error(settings: Command, field: str, wanted: str, reason: str) -> ConfigError:
    """Says that a setting's file will not do."""
    given = str(getattr(settings, field))
    return ConfigError(f"quire {settings.name}: {settings.flag(field)} takes {wanted}, not {given!r}: {reason}")


def _reason(error: OSError | UnicodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

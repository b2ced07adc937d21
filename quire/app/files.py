"""Checks files that settings name, before a command runs."""

from __future__ import annotations

import os
from pathlib import Path

from quire.config.command import Command, ConfigError
from quire.config.types import read_template


def check_readable(settings: Command, field: str, encoding: str = "latin-1") -> None:
    """Check that the file of a setting can be read. With latin-1, any content is accepted.

    Raises:
        ConfigError: it cannot be read.
    """
    path: Path | None = getattr(settings, field)
    if path is None:
        return
    try:
        path.read_text(encoding)
    except (OSError, UnicodeError) as error:
        raise file_error(settings, field, "a readable file", _reason(error)) from error


def check_template(settings: Command, field: str) -> None:
    """Check that a setting is a template, or a file with one.

    Raises:
        ConfigError: it is neither.
    """
    template: str | None = getattr(settings, field)
    if template is None:
        return
    try:
        read_template(template)
    except (OSError, ValueError) as error:
        raise file_error(settings, field, "a readable file or the text of a template", _reason(error)) from error


def check_writable(settings: Command, field: str) -> None:
    """Check that the file of a setting can be written, without creating it.

    Raises:
        ConfigError: it cannot be written.
    """
    path: Path | None = getattr(settings, field)
    if path is None:
        return
    if path.is_dir():
        raise file_error(settings, field, "a writable file", "it is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise file_error(settings, field, "a writable file", "permission denied")


def file_error(settings: Command, field: str, expected: str, reason: str) -> ConfigError:
    """The error of a setting whose file cannot be used."""
    value = str(getattr(settings, field))
    return ConfigError(f"quire {settings.name}: {settings.flag(field)} expects {expected}, not {value!r}: {reason}")


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

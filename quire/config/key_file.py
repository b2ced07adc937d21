"""The file of API keys (--api-key-file): whose keys they are, hashed, and what each client may do with its own."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from quire.config.types import RateLimit

_MAX_SIZE = 1 << 20  # bytes
_MAX_ENTRIES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_OF_NOTHING = hashlib.sha256().digest()  # most likely of an unset variable
_NAMES = "1 to 64 letters, digits and . _ @ + - (the first is a letter or digit)"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class KeyEntry(BaseModel):
    """A table of the file: a client and its keys.

    Attributes:
        sha256: SHA-256 of each key in hexadecimal digits; several while a key is being replaced.
        admin: the keys are admin keys.
        requests_per_minute, tokens_per_minute, max_concurrent_requests: None: as for other keys; 0: no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]],
        BeforeValidator(_as_list),
        Field(min_length=1, max_length=16),
    ]
    admin: bool = False
    requests_per_minute: RateLimit | None = None
    tokens_per_minute: RateLimit | None = None
    max_concurrent_requests: RateLimit | None = None

    @property
    def digests(self) -> list[bytes]:
        """The hashes of all keys."""
        return [bytes.fromhex(text) for text in self.sha256]


_EXPECTED = {
    "sha256": "64 hexadecimal digits, the SHA-256 of a key as `quire key` writes it, or a list of up to 16 of them",
    "admin": "true or false",
}
_LIMITS = "an integer from 0 to 10^12; 0: no limit"


class KeyFileError(Exception):
    """The file of keys cannot be used; the message says why."""


def read_key_file(path: Path) -> dict[str, KeyEntry]:
    """The entries of a file of keys by name.

    Raises:
        KeyFileError: it cannot be read, or an entry is not valid.
    """
    tables = _read_toml(path)
    if len(tables) > _MAX_ENTRIES:
        raise KeyFileError(f"{path} has {len(tables)} tables, but may have {_MAX_ENTRIES}")
    try:
        return {name: _entry(name, table) for name, table in tables.items()}
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from error


def check_name(name: str) -> None:
    """Check the name of a client.

    Raises:
        KeyFileError: it is not valid.
    """
    if _NAME.fullmatch(name) is None:
        raise KeyFileError(f"a name has {_NAMES}, which {name[:100]!r} does not")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SIZE + 1)
        if len(content) > _MAX_SIZE:
            raise KeyFileError(f"{path} is larger than {_MAX_SIZE >> 20} MiB")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path} is not a valid TOML file: {str(error)[:200]}") from error


def _entry(name: str, table: Any) -> KeyEntry:
    check_name(name)
    if not isinstance(table, dict):
        raise KeyFileError(f"{name!r} must be a table with the keys of a client: [{name}]")
    try:
        entry = KeyEntry.model_validate({key.replace("-", "_"): value for key, value in table.items()})
    except ValidationError as error:
        field = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        if field not in KeyEntry.model_fields:
            settings = ", ".join(setting.replace("_", "-") for setting in KeyEntry.model_fields)
            raise KeyFileError(f"[{name}] has no setting {field[:100]!r}; there are {settings}") from None
        expected = _EXPECTED.get(field, _LIMITS)
        raise KeyFileError(f"{field.replace('_', '-')} of [{name}] expects {expected}") from None
    if _OF_NOTHING in entry.digests:
        raise KeyFileError(f"[{name}] has the SHA-256 of an empty key")
    return entry


def table_of(name: str, settings: Mapping[str, str | bool | int]) -> str:
    """The text of a table in the file."""
    lines = [f'["{name}"]']
    for key, value in settings.items():
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        lines.append(f"{key.replace('_', '-')} = {text}")
    return "\n".join(lines)

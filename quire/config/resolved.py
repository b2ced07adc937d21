"""What a command's settings are, and where each comes from: a flag, a variable, the file or the default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from quire.config.command import Command
from quire.config.commands import Config
from quire.config.environment import ENV_PREFIX, is_service_link
from quire.config.other_servers.variables import VARIABLES
from quire.config.secrets import HIDDEN, is_secret, without_passwords
from quire.config.value_help import size_text


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """A setting.

    Attributes:
        name: its flag without the leading dashes, or the name of the positional argument.
        value: as it can be written in JSON and in the file; without secrets.
        is_hidden: a secret was removed from the value.
        source: where it comes from, such as `flag` or `variable QUIRE_PORT`.
    """

    name: str
    value: Any
    is_hidden: bool
    source: str


def resolved_settings(settings: Command, environment: Mapping[str, str]) -> list[ResolvedSetting]:
    """Return all settings of `quire serve` that `settings` has."""
    return [
        _resolved(settings, field, environment)
        for field in type(settings).model_fields
        if field not in Config.own_fields()
    ]


def _resolved(settings: Command, field: str, environment: Mapping[str, str]) -> ResolvedSetting:
    value = getattr(settings, field)
    written = _written(value)
    shown = _without_secrets(written)
    if value and is_secret(type(settings).model_fields[field]):
        shown = HIDDEN
    name = settings.flag(field).removeprefix("--").lower()
    return ResolvedSetting(name, shown, shown != written, _source(settings, field, environment))


def _source(settings: Command, field: str, environment: Mapping[str, str]) -> str:
    if field in settings.flags:
        return "flag"
    for name, value in environment.items():
        if name.upper() == ENV_PREFIX + field.upper() and not is_service_link(name, value):
            return f"variable {name}"
    if field in settings.file_settings():
        return f"file {settings.config}"
    for name, variable in VARIABLES.items():
        value = environment.get(name, "")
        is_set = name in environment and not is_service_link(name, value)
        if is_set and variable.field == field and variable.convert(value) is not None:
            return f"variable {name}"
    return "default"


def _written(value: Any) -> Any:
    match value:
        case ByteSize():
            return size_text(value)
        case Path():
            return str(value)
        case tuple():
            return [_written(item) for item in value]
        case _:
            return value


def _without_secrets(value: Any) -> Any:
    match value:
        case str():
            return without_passwords(value)
        case list():
            return [_without_secrets(item) for item in value]
        case dict():
            return {name: _without_secrets(item) for name, item in value.items()}
        case _:
            return value


def as_json(settings: Sequence[ResolvedSetting]) -> dict[str, Any]:
    """Return the settings as an object of their values and sources."""
    return {setting.name: {"value": setting.value, "source": setting.source} for setting in settings}


def as_toml(settings: Sequence[ResolvedSetting]) -> Iterator[str]:
    """Yield the lines of a file for --config, in which hidden values are comments."""
    yield "[serve]"
    for setting in settings:
        if setting.value is None or setting.name == "config":
            continue
        line = f"{setting.name} = {_toml(setting.value)}  # {setting.source}"
        yield f"# {line}" if setting.is_hidden else line


def as_text(settings: Sequence[ResolvedSetting]) -> Iterator[str]:
    """Yield the lines of a table; what is not the default comes first."""
    rows = [(setting.name, _text(setting.value), setting.source) for setting in settings]
    rows.sort(key=lambda row: row[2] == "default")
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    width = min(widths[1], 40)
    for name, value, source in rows:
        yield f"{name:<{widths[0]}}  {value:<{width}}  {source}"


def _text(value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _toml(value: Any) -> str:
    """A value in TOML, whose strings and lists are written as those of JSON. Objects are set as their JSON text."""
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

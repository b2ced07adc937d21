"""Settings of a command from flags, `QUIRE_*` variables, a TOML file and defaults, in this order of precedence."""

from __future__ import annotations

import os
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, cast

from pydantic import Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from quire.config.environment import ENV_PREFIX, is_service_link, service_links
from quire.config.types import WrongKey, shield_commas
from quire.config.value_help import describe, size_text


class ConfigError(Exception):
    """A setting is not valid; the message names its flag and the accepted values."""


class Command(BaseSettings):
    """Settings of a `quire` command. Subclasses add fields, mostly by inheriting option groups.

    The docstring of a subclass says what the command does; it is the beginning of its help.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
    )
    name: ClassVar[str]
    table: ClassVar[str] = ""  # in the file, if it is that of another command
    positional: ClassVar[frozenset[str]] = frozenset()

    _flags: frozenset[str] = PrivateAttr(frozenset())
    _notes: tuple[str, ...] = PrivateAttr(())
    _warnings: tuple[str, ...] = PrivateAttr(())

    config: Path | None = Field(None, description="TOML file with a table of settings for each command")

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Read this command's settings.

        Raises:
            ConfigError: a value is out of range or of the wrong type, or a setting does not exist.
            SystemExit: argparse printed the help, or refused a flag.
        """
        for argument in arguments:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse would take it for no value
                raise ConfigError(f"quire {cls.name}: {argument.removesuffix('=--')} expects a value, not '--'")
        translated, notes = cls.translate(arguments)
        try:
            source = CliSettingsSource[Any](
                cls,
                cli_parse_args=translated,
                cli_prog_name=f"quire {cls.name}",
                parse_args_method=cls._parse_flags,
                add_argument_method=_add_argument,
            )
            settings = cls(_cli_settings_source=source)
            settings._flags = frozenset(source())
            more, warnings = settings.notes_on_environment()
            settings._notes, settings._warnings = (*notes, *more), tuple(warnings)
            return settings
        except ValidationError as error:
            raise ConfigError("\n".join(cls._message(item) for item in error.errors())) from error
        except SettingsError as error:
            raise ConfigError(f"quire {cls.name}: {error.__cause__ or error}") from error

    @classmethod
    def _parse_flags(cls, parser: ArgumentParser, arguments: Sequence[str]) -> Any:
        """Return the namespace of the arguments. Errors have one line; those of argparse follow a list of all flags."""

        def refuse(message: str) -> NoReturn:
            parser.exit(2, f"quire {cls.name}: {message} `quire {cls.name} --help` lists all flags.\n")

        parser.error = lambda message: refuse(f"{message}.")  # type: ignore[method-assign]
        namespace, unknown = parser.parse_known_args(arguments)
        for argument in unknown:
            name = argument.partition("=")[0]
            nearest = get_close_matches(name, map(cls.flag, cls.model_fields), 1)
            refuse(f"unknown argument {_shown(name)}" + (f"; did you mean {nearest[0]}?" if nearest else "."))
        return namespace

    @property
    def flags(self) -> frozenset[str]:
        """Names of the settings that the command line sets."""
        return self._flags

    def file_settings(self) -> Mapping[str, Any]:
        """Return the settings in the file of `--config`."""
        return {} if self.config is None else _table_in(self.config, type(self))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say about flags and variables that were replaced or passed over."""
        return self._notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to say about variables that somebody may believe to have an effect."""
        return self._warnings

    def notes_on_environment(self) -> tuple[list[str], list[str]]:
        """Return what to say about variables of the environment, and what as a warning."""
        links = service_links(os.environ, ENV_PREFIX)
        if not links:
            return [], []
        shown = ", ".join(links[:3]) + (", ..." if len(links) > 3 else "")
        return [f"passed over {len(links)} variables that Kubernetes made for its Services: {shown}"], []

    @classmethod
    def translate(cls, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """The arguments with flags of other servers replaced, and notes about them.

        Raises:
            ConfigError: a flag of another server has no counterpart.
        """
        return list(arguments), []

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Add the file of `--config` or QUIRE_CONFIG as the source with the lowest precedence."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            name: value
            for name, value in env_settings.env_vars.items()
            if value is None or not is_service_link(name.upper(), value)
        }
        return init_settings, env_settings, _TomlFile(settings_cls)

    @classmethod
    def summary(cls) -> str:
        """Return what the command does, in a sentence; empty under `python -OO`, which has no docstrings."""
        return cls.__doc__ or ""

    @classmethod
    def flag(cls, field: str) -> str:
        """The flag, or the name of the positional argument, that sets a field."""
        return field.upper() if field in cls.positional else "--" + field.replace("_", "-")

    @classmethod
    def _message(cls, error: Any) -> str:
        field = str(error["loc"][0]) if error["loc"] else ""
        info = cls.model_fields.get(field)
        if info is None:
            return f"quire {cls.name}: " + (f"unknown setting {field!r}" if field else str(error["msg"]))
        cause = error.get("ctx", {}).get("error")
        reason = f": {cause}" if isinstance(cause, WrongKey) else ""
        return f"quire {cls.name}: {cls.flag(field)} expects {describe(info)}, not {_shown(error['input'])}{reason}"


_MAX_SHOWN = 200  # characters of a value in an error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "ByteSize": "SIZE"}
_EMPTY_DEFAULT = re.compile(r" \(default: (null|\(\)|\{\})?\)$")
_DEFAULT_SIZE = re.compile(r"(?<= \(default: )(\d+)(?=\)$)")


def _add_argument(parser: ArgumentParser, *names: str, **settings: Any) -> Any:
    """Add an argument whose help has a readable type and default, and whose list items keep their commas."""
    metavar = settings.get("metavar")
    text = settings.get("help", "")
    if isinstance(metavar, str):
        if metavar.startswith("tuple") or settings.get("nargs") == "*":
            settings["type"] = shield_commas
        if metavar == "ByteSize":
            text = _DEFAULT_SIZE.sub(lambda match: size_text(int(match[0])), text)
        if metavar.startswith("dict"):
            metavar = "JSON"
        if metavar.startswith("tuple"):
            metavar = "int" if "int" in metavar else "str"
        settings["metavar"] = _METAVARS.get(metavar, metavar)
    settings["help"] = _EMPTY_DEFAULT.sub("", text)
    return parser.add_argument(*names, **settings)


class _TomlFile(PydanticBaseSettingsSource):
    """The table of a command in the file that `--config` or QUIRE_CONFIG names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise KeyError(field_name)  # __call__ reads the whole file at once

    def __call__(self) -> dict[str, Any]:
        cls = cast("type[Command]", self.settings_cls)
        path = self.current_state.get("config")
        return {} if path is None else _table_in(path, cls)


def _table_in(path: str | Path, command: type[Command]) -> dict[str, Any]:
    """The settings of a command in a file.

    Raises:
        ConfigError: it cannot be read, or has tables of no command.
    """
    try:
        table: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # without the path, which may be long
        text = f"{command.flag('config')} expects a readable TOML file, not {_shown(str(path))}: {reason}"
        raise ConfigError(f"quire {command.name}: {text}") from error
    try:
        _check_tables(table, {known.name for known in Command.__subclasses__()})
    except ConfigError as error:
        raise ConfigError(f"quire {command.name}: {error} ({path})") from None
    for word in (command.table or command.name).split():
        table = table.get(word, {})
    return {key.replace("-", "_"): value for key, value in table.items()}


def _check_tables(table: Any, commands: set[str], *parents: str) -> None:
    """Check that each table belongs to a command, or contains only tables of commands."""
    for key, value in table.items():
        name, title = " ".join((*parents, key)), ".".join((*parents, key))
        if not isinstance(value, dict):
            outside = "must be inside a command's table, such as [serve]"
            raise ConfigError(f"{title!r} {'expects a table of settings' if name in commands else outside}")
        if name in commands:
            continue
        if not any(command.startswith(f"{name} ") for command in commands):
            tables = ", ".join(f"[{command.replace(' ', '.')}]" for command in sorted(commands))
            raise ConfigError(f"the table [{title}] does not belong to a command; the tables are {tables}")
        _check_tables(value, commands, *parents, key)

"""Every setting of every command takes values of any kind, or refuses them in words: flags, variables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_origin

import pytest

from quire.config.command import Command, ConfigError
from quire.config.commands import COMMANDS, Config, Render, Serve

VALUES = (
    *("", " ", "0", "-1", "1", "1.5", "-0.0", "1e400", "1e18", "1e-400", "nan", "inf", "-inf", "9" * 400, "0x10"),
    *("true", "maybe", "null", "[]", "{}", "{", '{"a": NaN}', "[" * 5000, '{"a": ' * 5000, '""', "[1, 2]", "=", ","),
    *(
        "a=b",
        "a" * 10_000,
        "/" * 5000,
        "\u00e9\u4e16",
        "\U0001f600",
        "\udcff",
        "\x01\x1b[31m",
        "\n",
        "%s{0}",
        ".",
    ),
    *("9" * 400 + "GiB", "infB", "1e400B", "-5GiB", "5XB", "http://[::", "http://a:99999999/", "a:b:c", "--", "-x"),
)
DIFFERENT = tuple(command for command in COMMANDS if command not in (Config, Render))  # which have those of Serve
# Characters of a refusal: all settings of the longest command, each with what it expects and the start of the value.
LONGEST = max(len(command.model_fields) for command in COMMANDS) * 300


def check(command: type[Command], arguments: list[str]) -> None:
    refusal = refusal_of(command, arguments)
    assert refusal is None or refusal.startswith(f"quire {command.name}: ")
    assert refusal is None or len(refusal) < LONGEST


def refusal_of(command: type[Command], arguments: list[str]) -> str | None:
    try:
        command.parse(arguments)
    except ConfigError as error:
        return str(error)
    except SystemExit as ended:  # of argparse, which has written its words; it takes some values for flags
        return f"quire {command.name}: exit" if ended.code == 2 else f"status {ended.code}"
    return None


def has_choices(command: type[Command], name: str) -> bool:
    """Whether argparse itself refuses other values, before it looks at later flags."""
    kind = command.model_fields[name].annotation
    return kind is bool or get_origin(kind) is Literal


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_any_value_is_accepted_or_refused_in_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in DIFFERENT:
        free = [name for name in command.model_fields if not has_choices(command, name) and name != "config"]
        flags = [name for name in free if name not in command.positional]
        check(command, [f"{command.flag(name)}={value}" for name in flags])
        check(command, ["--config", value])
        check(command, [value])
    for name in {name for command in DIFFERENT for name in command.model_fields} - {"config"}:
        monkeypatch.setenv(f"QUIRE_{name.upper()}", value)
    for command in DIFFERENT:
        check(command, [])


@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "''", "[]", "{}", "[[]]", "{a = 1}", "true", "1979-05-27", f"'{'x' * 5000}'"], ids=str
)
def test_any_value_in_a_file_is_accepted_or_refused_in_words(value: str, tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    for command in DIFFERENT:
        lines = [f"{name} = {value}" for name in command.model_fields if name != "config"]
        path.write_text("\n".join([f"[{command.name.replace(' ', '.')}]", *lines]))
        check(command, ["--config", str(path)])


def test_a_refusal_shows_the_start_of_a_long_value() -> None:
    refusal = refusal_of(Serve, ["--port", "x" * 5000])
    assert refusal is not None
    assert len(refusal) < 300

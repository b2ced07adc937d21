"""Writes docs/configuration.md: `python -m quire.config.table > docs/configuration.md`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire.config.command import Command
from quire.config.commands import COMMANDS, Serve
from quire.config.environment import ENV_PREFIX
from quire.config.value_help import describe, size_text

_HEAD = """# Settings

Every setting of a command can be set as a flag, as an environment variable `QUIRE_*`, or as a key of the TOML file that
`--config` names. Flags take precedence over variables, and variables over the file. The file has a table for each
command; its keys are the names of the flags without the leading dashes:

```toml
[serve]
model = ["path/to/model"]
max-model-len = 4096

[bench.serve]
concurrency = 32
```

A switch that is on by default is turned off with `--no-...`. Lists are set by repeating the flag, by a variable with
commas, or by a TOML array. Invalid values are refused with the name of the setting and its accepted values, and unknown
variables or keys are refused as well. Settings of the same name have the same meaning in all commands and share their
variable: `QUIRE_API_KEY` is the key that a server requires and that clients send. There are exceptions, which are
better set by flags or in the file: `--endpoint` accepts other values in `quire bench serve` than in
`quire bench pooling`; FILE is audio for `quire listen` and text for `quire embed`; `--timeout` is that of a request,
but in `quire bench startup` that of a whole start; `--model-name` is the name of a served model, but in `quire embed`
without `--url` a Hugging Face id or a directory.

`--reasoning-parser` and `--tool-call-parser` take names of parsers, which are listed in
[structured outputs, reasoning and tools](api/structured-outputs-and-tools.md).

This page is written by `python -m quire.config.table`; a test keeps it up to date.
"""


def page() -> str:
    """The text of docs/configuration.md."""
    return "\n".join([_HEAD, *(_section(command) for command in COMMANDS)])


def _section(command: type[Command]) -> str:
    others = Serve.model_fields if issubclass(command, Serve) and command is not Serve else {}
    rows = [_row(command, name, field) for name, field in command.model_fields.items() if name not in others]
    lines = [f"## `quire {command.name}`", "", command.summary()]
    if others:
        lines[-1] += " It has all settings of `quire serve`" + (", and:" if rows else ", and reads its table.")
    table = ["| flag | variable | values | default | meaning |", "|---|---|---|---|---|", *rows, ""]
    return "\n".join([*lines, "", *(table if rows else [])])


def _row(command: type[Command], name: str, field: FieldInfo) -> str:
    cells = [
        f"`{command.flag(name)}`",
        f"`{ENV_PREFIX}{name.upper()}`",
        describe(field),
        _default(field.default),
        field.description or "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None or value == () or value == {} or value == "":
        return ""
    if isinstance(value, ByteSize):
        return f"`{size_text(value)}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 writes the page

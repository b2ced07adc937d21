"""Writes the settings' tables of docs/configuration.md: `python -m quire.config.table > docs/configuration.md`."""

from __future__ import annotations

import json
from typing import Any

from pydantic.fields import FieldInfo

from quire.config.command import ENV_PREFIX, Command
from quire.config.commands import COMMANDS
from quire.config.takes import describe

_HEAD = """# Settings

Every setting of a command can be given as a flag, as a `QUIRE_*` variable or as a key of the TOML file that `--config`
names; a flag goes before a variable, a variable before the file. The file has a table for each command, whose keys are
the flags' names without the dashes in front:

```toml
[serve]
model = ["path/to/model"]
max-model-len = 4096

[bench.serve]
concurrency = 32
```

A switch that is on by default is turned off with `--no-...`. A list is given by repeating its flag, as a variable with
commas in between, or as a TOML array.
A value that will not do is refused with the setting's name and what it takes, and a variable or key that names nothing
is refused as well.

This page is written by `python -m quire.config.table`; a test holds it to the code.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(command) for command in COMMANDS)])


def _section(command: type[Command]) -> str:
    rows = [_row(command, name, field) for name, field in command.model_fields.items()]
    return "\n".join(
        [
            f"## `quire {command.name}`",
            "",
            f"{command.summary[0].upper()}{command.summary[1:]}.",
            "",
            "| flag | variable | takes | default | |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


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
    if value is None or value == () or value == {} or value == "":
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 its output is the page

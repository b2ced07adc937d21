"""The `quire` command."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from quire import __version__
from quire.config.command import Command, ConfigError, unknown_variables
from quire.config.commands import COMMANDS

# Modules are imported when their command runs: `quire chat` needs no torch.
_HOMES = {
    "serve": "quire.app.serve",
    "chat": "quire.app.chat",
    "bench serve": "quire.app.bench.serve",
    "bench startup": "quire.app.bench.startup",
}
_HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])
_USAGE = 2  # the status with which argparse ends as well


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name and exit with its status."""
    # Idle OpenMP threads must sleep: on few cores spinning ones stall the event loop and the kernels' own threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch asks for huge pages: weights are then read a third faster or more.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["--version"], ["-v"]):
        print(f"quire {__version__}")
        return
    found = _find(given)
    if found is None:
        asked = (given[1:] if given[:1] == ["bench"] else given[:1]) in _HELP
        print(_overview(), file=sys.stdout if asked else sys.stderr)
        if not asked:
            print(f"quire: there is no command {_spoken(given)!r}", file=sys.stderr)
        sys.exit(0 if asked else _USAGE)
    command, rest = found
    try:
        for name in unknown_variables(COMMANDS):
            raise ConfigError(f"quire: the environment variable {name} names no setting")
        settings = command.parse(rest)
        status = importlib.import_module(_HOMES[command.name]).run(settings)
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _find(given: Sequence[str]) -> tuple[type[Command], Sequence[str]] | None:
    for command in COMMANDS:
        words = command.name.split()
        if list(given[: len(words)]) == words:
            return command, given[len(words) :]
    return None


def _spoken(given: Sequence[str]) -> str:
    """The words with which a command was meant."""
    return " ".join(given[: 2 if given[0] == "bench" else 1])


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  quire {command.name:<{width}}   {command.summary}" for command in COMMANDS]
    return "\n".join([f"Quire {__version__}, an inference server", "", *lines, "", "Each takes --help."])

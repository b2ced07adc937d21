"""The commands of `quire`: which one is meant, its settings, its run."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from quire import __version__
from quire.config.command import Command, ConfigError
from quire.config.commands import COMMANDS, Render, Serve
from quire.config.environment import misspelt
from quire.engine.client.launch import PreparedProcess
from quire.engine.models.config_reader import ConfigReader

# Modules are imported when their command runs: `quire chat` does not need torch.
_MODULES = {
    "serve": "quire.app.serve",
    "render": "quire.app.render",
    "key": "quire.app.key",
    "config": "quire.app.show_config",
    "collect-env": "quire.app.collect_env",
    "chat": "quire.app.chat",
    "listen": "quire.app.listen",
    "embed": "quire.app.embed.command",
    "bench serve": "quire.app.bench.serve",
    "bench pooling": "quire.app.bench.pooling",
    "bench startup": "quire.app.bench.startup",
    "bench accuracy": "quire.app.bench.accuracy",
}
_HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])
_USAGE_ERROR = 2  # exit status, as of argparse


def run_command(
    words: Sequence[str], configs: ConfigReader | None = None, prepared: PreparedProcess | None = None
) -> None:
    """Run a command and exit with its status.

    Args:
        words: those after `quire`.
        configs: a reader that `quire serve` and `quire render` use.
        prepared: a process that `quire serve` uses.
    """
    match = _find(words)
    if match is None:
        asked = (words[1:] if words[:1] == ["bench"] else words[:1]) in _HELP
        print(_overview(), file=sys.stdout if asked else sys.stderr)
        if not asked:
            word = _command_words(words)
            similar = get_close_matches(word, [command.name for command in COMMANDS], 1, 0.75)
            meant = f"; did you mean `quire {similar[0]}`?" if similar else ""
            print(f"quire: there is no command {word!r}{meant}", file=sys.stderr)
        sys.exit(0 if asked else _USAGE_ERROR)
    command, options = match
    try:
        for name, nearest in misspelt(os.environ, {field for kind in COMMANDS for field in kind.model_fields}):
            meant = f"; did you mean {nearest}?" if nearest else ""
            raise ConfigError(f"quire: unknown environment variable {name}{meant}")
        settings = command.parse(options)
        module = importlib.import_module(_MODULES[command.name])
        if command is Serve:
            status = module.run(settings, configs, prepared)
        elif command is Render:
            status = module.run(settings, configs)
        else:
            gc.enable()
            status = module.run(settings)
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _find(words: Sequence[str]) -> tuple[type[Command], Sequence[str]] | None:
    for command in COMMANDS:
        name = command.name.split()
        if list(words[: len(name)]) == name:
            return command, words[len(name) :]
    return None


def _command_words(arguments: Sequence[str]) -> str:
    """The arguments that were meant as a command."""
    return " ".join(arguments[: 2 if arguments[0] == "bench" else 1])


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  quire {command.name:<{width}}   {command.summary()}" for command in COMMANDS]
    return "\n".join(
        [f"Quire {__version__}, an inference server", "", *lines, "", "Use --help after a command for its settings."]
    )

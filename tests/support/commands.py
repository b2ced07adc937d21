"""Lets the engine of a test do what an operator asks for."""

from __future__ import annotations

from quire.engine.client.protocol import Command, CommandDone, RunCommand
from tests.support.engine import Engine


def answers(engine: Engine) -> list[CommandDone]:
    """The core's answers to commands since the last call."""
    done = [sent for sent in engine.channel.sent if isinstance(sent, CommandDone)]
    engine._collect()
    return done


def run(engine: Engine, command: Command) -> CommandDone:
    """The answer to a command."""
    engine.core._handle(RunCommand(7, command))
    (done,) = answers(engine)
    return done


def do(engine: Engine, command: Command) -> None:
    """Run a command that is possible."""
    assert run(engine, command) == CommandDone(7)

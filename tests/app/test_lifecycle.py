"""The life of the `quire serve` process: it shuts down cleanly at any time and leaves no processes behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.app.running_models import RunningModel
from tests.support.process import no_children_of, tiny_model

# Runs `quire serve` with one of its functions replaced by one that reports where it is and then waits.
_SCRIPT = """
import sys, time
import quire.app.cli
if sys.argv[1] == "resolving":
    import quire.app.serve as module
    def stand_still(*_):
        print("HERE", flush=True)
        while True:
            time.sleep(0.01)
    module.resolve_models = stand_still
elif sys.argv[1] == "weights":
    import quire.engine.models.checkpoint.checkpoint as module
    def stand_still(self, dtype, progress, window_of=None):
        print("HERE", flush=True)
        while True:
            time.sleep(0.01)
            progress(0)
        yield
    module.SafetensorsCheckpoint.tensors = stand_still
quire.app.cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param("resolving", signal.SIGTERM, marks=pytest.mark.slow),
        ("resolving", signal.SIGINT),
        ("weights", signal.SIGTERM),
        pytest.param("weights", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_loading_ends_the_server_cleanly(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, moment, "serve", str(tiny_model(tmp_path)), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "HERE" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    log = "".join(lines) + output
    assert process.returncode == (130 if number == signal.SIGINT else 0), log
    assert f"stopped by {number.name}" in log
    assert "Traceback" not in log
    assert "error" not in log.lower()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--engine-process"], ["quire-nano"]], ids=["threads", "processes", "one model"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_at_any_moment_leaves_no_processes(flags: list[str], number: signal.Signals, tmp_path: Path) -> None:
    """Sixteen starts, each stopped a little later than the one before."""
    for attempt in range(16):
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
            seen: set[int] = set()
            end = time.monotonic() + 0.1 + 0.3 * attempt
            while time.monotonic() < end:
                seen |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
                time.sleep(0.01)
            process.send_signal(number)
            log, _ = process.communicate(timeout=60)
        assert process.returncode in (0, -number), log
        assert "Traceback" not in log
        no_children_of(list(seen))
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("quire-")]


async def test_a_stopped_engine_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the core, its grammars and masks, the renderer and the grammar checker all end."""
    from quire.app.engines import RunningEngine
    from quire.app.models import ModelSource
    from quire.config.commands import Serve
    from quire.engine.client.sampling_params import SamplingParams
    from quire.engine.client.stream import GenerateRequest
    from quire.engine.models.model_config import read_model_config
    from quire.serving.models import GeneratingModel
    from tests.support.fake_core import prompt_of

    before = threading.enumerate()
    folder = tiny_model(tmp_path)
    settings = Serve.parse([str(folder), "--kv-cache-memory-bytes", "16MiB"])
    source = ModelSource(folder, str(folder), ("model",))
    engine = RunningEngine(source, read_model_config(folder), settings, None)
    model = await engine.loaded()
    assert isinstance(model, GeneratingModel)
    grammar = await model.grammars.check(lambda _: '{"grammars": [{"json_schema": {"type": "boolean"}}]}', "x")
    params = SamplingParams(max_tokens=3, grammar=grammar.text, eos_token_ids=model.eos_token_ids)
    request: Any = GenerateRequest(prompt=prompt_of("yes or no?"), params=params)
    assert [delta async for delta in model.client.generate(request)]
    await engine.stop()
    started = [thread for thread in threading.enumerate() if thread.name.startswith("quire") and thread not in before]
    for thread in started:  # those that were told to end may still be at it
        await asyncio.to_thread(thread.join, 10)
    assert not [thread.name for thread in started if thread.is_alive()]


async def no_models(_: object) -> AsyncIterator[RunningModel]:
    """Start nothing."""
    models: list[RunningModel] = []
    for model in models:
        yield model


@pytest.mark.parametrize("where", ["given", "default"])
@pytest.mark.parametrize("kind", ["folder", "text", "locked"])
def test_a_store_that_cannot_be_used_is_said_at_start(
    tmp_path: Path, kind: str, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.api.responses import database, sqlite_file
    from quire.app import lifecycle
    from quire.config.commands import Serve

    monkeypatch.setattr(database, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_file, "LOCK_SECONDS", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "quire" / "responses.db"
    file.parent.mkdir()
    with closing(sqlite3.connect(tmp_path / "other.db", isolation_level=None)) as other:
        if kind == "folder":
            file.mkdir()
        elif kind == "text":
            file.write_text("no database\n" * 100)
        else:
            other.execute("BEGIN IMMEDIATE")
            file.symlink_to(tmp_path / "other.db")
        settings = Serve(response_store=f"sqlite:///{file}") if where == "given" else Serve()
        assert lifecycle.serve(settings, no_models, []) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("cannot serve: The store of responses ")
    assert str(file) in message
    assert "SELECT" not in message

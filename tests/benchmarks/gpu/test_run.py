"""benchmarks/gpu/run: the order of its parts, and what happens when one fails or time is over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAKE = """#!/bin/sh
case "$*" in *"import xdist"*) exit 1 ;; esac
echo "$*" >> "$LOG"
case "$*" in *"$FAILS"*) exit 3 ;; esac
"""

FAKE_TIMEOUT = """#!/bin/sh
echo "$2" >> "$LOG.seconds"
shift 2
exec "$@"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with programs python3 and timeout that record how they are called."""
    for name, text in (("python3", FAKE), ("timeout", FAKE_TIMEOUT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def calls(folder: Path, *parts: str, fails: str = "nothing", **environment: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and the modules that were called, with their first argument."""
    log, paths = folder / "log", f"{folder}:{os.environ['PATH']}"
    fixed = {"PATH": paths, "LOG": str(log), "FAILS": fails, "OUT": str(folder / "out")}
    command = ["bash", str(ROOT / "benchmarks/gpu/run"), *parts]
    done = subprocess.run(command, env={**fixed, **environment}, capture_output=True, text=True, check=False)
    lines = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stdout + done.stderr, [" ".join(line.split()[1:3]) for line in lines]


def test_the_most_valuable_comes_first(run: Path) -> None:
    status, _, called = calls(run)
    assert status == 0
    engine, summary = "benchmarks.gpu.engine", f"benchmarks.gpu.summary {run / 'out'}"
    expected = ["pytest -c", f"{engine} llama-3-8b", summary, f"{engine} llama-3-8b", summary, "pytest -c"]
    kernels = [f"benchmarks.gpu.{name} --out" for name in ("small_ops", "matmul", "attention")]
    assert called == [*expected, *kernels, "benchmarks.gpu.matmul --groups"]


def test_a_part_that_fails_does_not_stop_the_others(run: Path) -> None:
    status, output, called = calls(run, "engine", "kernels", fails="engine llama", SHAPES="llama-3-8b")
    assert status == 1
    assert "FAILED (status 3) python3 -m benchmarks.gpu.engine llama-3-8b" in output
    assert called[-1] == "benchmarks.gpu.attention --out"


def test_several_models(run: Path) -> None:
    _, _, called = calls(run, "engine", SHAPES="qwen3-0.6b qwen3-30b-a3b")
    assert called[::2] == ["benchmarks.gpu.engine qwen3-0.6b", "benchmarks.gpu.engine qwen3-30b-a3b"]


def test_nothing_begins_when_time_is_over(run: Path) -> None:
    status, output, called = calls(run, "engine", LIMIT="3")
    assert status == 1
    assert "FAILED (not begun: 3 seconds are over) python3 -m benchmarks.gpu.engine llama-3-8b" in output
    assert not [line for line in called if "engine" in line]


def test_each_benchmark_of_kernels_has_its_time(run: Path) -> None:
    calls(run, "engine", "kernels")
    engine, *kernels = map(int, (run / "log.seconds").read_text().split())
    assert engine > 500
    assert kernels == [240] * 3


def test_an_unknown_part_is_named(run: Path) -> None:
    status, output, _ = calls(run, "kernel")
    assert status == 2
    assert "unknown part kernel: smoke, engine, peer, tests, kernels, groups and tune are known" in output


def test_all_files_of_the_script_exist() -> None:
    script = (ROOT / "benchmarks/gpu/run").read_text()
    paths = [word for line in script.splitlines() for word in line.split() if word.startswith("tests/")]
    assert len(paths) >= 6
    assert [path for path in paths if not (ROOT / path).exists()] == []

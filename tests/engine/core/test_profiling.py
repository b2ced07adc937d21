"""Profiles of steps: what is in their files, and when they end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from quire.config.options import ParallelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import StartProfile, StopProfile
from tests.support.commands import do, run
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, greedy
from tests.support.models import make_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines whose profiles are given up at the end, as a process has one profiler."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.core._profiling.close()


def profiled(
    engines: list[Engine], folder: Path, traces: Path | str, parallel: ParallelOptions | None = None, **settings: Any
) -> Engine:
    """An engine that writes profiles."""
    config = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False, **settings}
    engines.append(Engine(folder, profiler_config=config, parallel=parallel))
    return engines[-1]


def names(path: Path) -> list[str]:
    """The names of the events of a profile."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event.get("name", "") for event in json.loads(content)["traceEvents"]]


def steps(path: Path) -> list[str]:
    """The names of the steps in a profile."""
    return list(dict.fromkeys(name for name in names(path) if name.startswith("step of")))


def test_a_profile_has_the_steps_between_start_and_stop(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    engine = profiled(engines, folder, tmp_path / "made")
    engine.generate([1, 2, 3, 4, 5], greedy(2))
    do(engine, StartProfile())
    engine.generate([1, 2, 3], greedy(3))
    do(engine, StopProfile())
    engine.generate([1, 2, 3, 4], greedy(2))
    (path,) = (tmp_path / "made").iterdir()
    assert path.name.startswith("llama-rank-0.")
    assert path.name.endswith(".pt.trace.json.gz")
    assert steps(path) == ["step of 3 tokens, 1 requests", "step of 0 tokens, 1 requests"]
    assert any(name.startswith("aten::") for name in names(path))


def test_each_profile_has_a_file(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    engine = profiled(engines, folder, tmp_path, torch_profiler_use_gzip=False)
    for count in (1, 2):
        do(engine, StartProfile())
        engine.generate([1, 2, 3], greedy(1))
        do(engine, StopProfile())
        assert len(list(tmp_path.glob("*.pt.trace.json"))) == count


def test_a_profile_ends_after_a_number_of_steps(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    engine = profiled(engines, folder, tmp_path, max_iterations=2, delay_iterations=1)
    do(engine, StartProfile())
    engine.add("a", [1, 2, 3], greedy(9))
    for _ in range(3):
        assert not engine.core._profiling.is_over
        engine.step()
    assert engine.core._profiling.is_over
    engine.core._stop_profile()
    (path,) = tmp_path.iterdir()
    engine.run()
    assert steps(path) == ["step of 0 tokens, 1 requests"]  # not of the prompt
    do(engine, StopProfile())  # it has ended by itself
    assert "No profile" in str(run(engine, StopProfile()).error)
    do(engine, StartProfile())


def test_a_profile_of_an_idle_engine_ends_after_a_time(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    engine = profiled(engines, folder, tmp_path, max_seconds=1e-3)
    do(engine, StartProfile())
    assert (engine.core._wait() or 0.0) < 1
    while not engine.core._profiling.is_over:
        pass
    engine.core._stop_profile()
    assert len(list(tmp_path.iterdir())) == 1


def test_one_profile_at_a_time(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    engine, other = (profiled(engines, folder, tmp_path) for _ in range(2))
    do(engine, StartProfile())
    done = run(engine, StartProfile())
    assert "already" in str(done.error)
    assert not done.invalid
    assert "Another model" in str(run(other, StartProfile()).error)
    do(engine, StopProfile())
    do(other, StartProfile())


def test_a_profile_that_cannot_begin_at_its_first_step_is_given_up(
    engines: list[Engine], folder: Path, tmp_path: Path
) -> None:
    """It begins after a delay, when another model of the process is being recorded."""
    engine, other = (profiled(engines, folder, tmp_path, delay_iterations=1) for _ in range(2))
    for started in (engine, other):
        do(started, StartProfile())
    assert engine.generate([1, 2, 3], greedy(4)).finish_reason == "length"
    assert other.generate([1, 2, 3], greedy(4)).finish_reason == "length"
    assert "No profile" in str(run(other, StopProfile()).error)
    do(engine, StopProfile())


def test_if_a_rank_cannot_record_none_does(engines: list[Engine], folder: Path, tmp_path: Path) -> None:
    """Here because all ranks are in one process, which has one profiler."""
    engine = profiled(engines, folder, tmp_path, parallel=ParallelOptions(tensor_parallel_size=2))
    assert "Another model" in str(run(engine, StartProfile()).error)
    assert not engine.core._profiling.is_over
    assert not list(tmp_path.iterdir())
    alone = profiled(engines, folder, tmp_path)
    do(alone, StartProfile())
    assert "Another model" in str(run(engine, StartProfile()).error)
    do(alone, StopProfile())
    engine.core.close()


class _Locked(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store for which there are no credentials: its error is of a class of its own, as those of clouds are."""

    protocol = "locked"

    def _open(self, *_: Any, **__: Any) -> Any:
        raise type("NoCredentialsError", (Exception,), {})("who are you?")


def test_a_store_without_credentials_does_not_end_the_engine(engines: list[Engine], folder: Path) -> None:
    fsspec.register_implementation("locked", _Locked, clobber=True)
    engine = profiled(engines, folder, "locked://traces")
    do(engine, StartProfile())
    assert "NoCredentialsError: who are you?" in str(run(engine, StopProfile()).error)
    assert engine.generate([1, 2, 3], greedy(3)).finish_reason == "length"


def test_a_file_that_cannot_be_written_is_an_error_and_the_engine_goes_on(
    engines: list[Engine], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for traces in (tmp_path / "file", "nothing-like-this://bucket/traces"):
        engine = profiled(engines, folder, traces)
        do(engine, StartProfile())
        assert "cannot be written" in str(run(engine, StopProfile()).error)
        assert engine.generate([1, 2, 3], greedy(3)).finish_reason == "length"


def test_profiles_are_written_to_uris(engines: list[Engine], folder: Path) -> None:
    engine = profiled(engines, folder, "memory://traces/")
    do(engine, StartProfile())
    engine.generate([1, 2, 3], greedy(1))
    do(engine, StopProfile())
    (name,) = fsspec.filesystem("memory").ls("/traces", detail=False)
    with fsspec.open(f"memory:/{name}", "rb") as file:
        assert b"step of 3 tokens" in gzip.decompress(file.read())


def test_steps_of_encoders_are_profiled(engines: list[Engine], tmp_path: Path) -> None:
    """They run in threads."""
    engine = profiled(engines, tiny_embedder(tmp_path / "model"), tmp_path / "traces")
    do(engine, StartProfile())
    engine.generate([5, 6, 7], PoolingParams(task="embed"))
    do(engine, StopProfile())
    (path,) = (tmp_path / "traces").iterdir()
    assert any(name.startswith("aten::") for name in names(path))

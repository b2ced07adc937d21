"""Settings that hold for every test."""

from __future__ import annotations

import gc
import glob
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.preloaded import start_worker

# Before torch, transformers or triton are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not glob.glob("/dev/nvidia[0-9]*"):  # without a GPU, Triton kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
for name in [name for name in os.environ if name.startswith("QUIRE_")]:
    del os.environ[name]

_FREEZE = gc.freeze  # tests replace it

# Neither the tests nor the servers that they start use the user's home folder: stored responses, caches, settings. All
# processes of pytest-xdist have one home, but a store of responses each.
XDIST_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
TEMPORARY_HOME = None if XDIST_WORKER else tempfile.mkdtemp(prefix="quire-tests-")
if TEMPORARY_HOME:
    os.environ["HOME"] = TEMPORARY_HOME
for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "TRITON_CACHE_DIR"):
    os.environ.pop(name, None)
os.environ["XDG_STATE_HOME"] = str(Path.home() / (XDIST_WORKER or "state"))

# Where the tests run in the background, these are ignored, and processes that the tests start would ignore them too. A
# handler is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def patient_workers() -> Iterator[None]:
    """Jobs of worker processes have a limit of real time as well, which a busy machine could exceed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.workers.process._WALL_TIME", 100)
        yield


@pytest.fixture(autouse=True, scope="session")
def preloaded_workers() -> Iterator[Any]:
    """Worker processes are forked from a process with their imports. Gives the function that starts them otherwise."""
    from quire.workers import process

    create = process._create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_create", start_worker)
        yield create


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """PyTorch and the kernels compute with one thread: several wait for each other longer than tiny models take.

    The tests of the kernels use two, and tests whose subject is the number set it.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def shared_routes() -> Iterator[None]:
    """Servers in the process of the tests share FastAPI's descriptions of their routes."""
    from tests.support.shared_routes import share

    with pytest.MonkeyPatch.context() as patch:
        share(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def skipped_environments() -> Iterator[None]:
    """Settings are not looked for in an environment that has none of them.

    pydantic-settings looks for the variable of each field in turn. For the settings of a server, of which hundreds of
    tests start one, that takes longer than FastAPI needs for all its routes.
    """
    from pydantic_settings import EnvSettingsSource

    read = EnvSettingsSource.__call__

    def read_if_any(source: EnvSettingsSource) -> dict[str, Any]:
        prefix = source.env_prefix.lower()
        if type(source) is EnvSettingsSource and not any(name.lower().startswith(prefix) for name in source.env_vars):
            return {}
        return read(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvSettingsSource, "__call__", read_if_any)
        yield


@pytest.fixture(autouse=True, scope="session")
def frozen_objects() -> Iterator[None]:
    """What is frozen after the collection of tests stays so, and nothing else is frozen: see `pytest_collection`.

    An engine that falls asleep unfreezes all objects. In this process each later full collection would take a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture
def started_workers(preloaded_workers: Any) -> Iterator[None]:
    """Worker processes start as those of servers do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.workers.process._create", preloaded_workers)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Freeze what a file of tests leaves: libraries that it has imported, and their caches.

    Later full collections, of which some tests make many, would look at all of it.
    """
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            _FREEZE()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze what is there once all tests are known: a full collection would look at a million objects for a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    if TEMPORARY_HOME:
        shutil.rmtree(TEMPORARY_HOME, ignore_errors=True)

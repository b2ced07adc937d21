"""How several engines in one server share memory, and in which order they load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from quire.app import engines
from quire.app.engines import RunningEngine, gpu_share, host_share, start_engines
from quire.app.models import ModelSource
from quire.config.commands import Serve
from quire.engine.build import engine as build
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.errors import EngineDead
from quire.engine.execution.devices import select
from quire.engine.execution.memory import MemoryShare
from quire.engine.models.model_config import read_model_config
from tests.support.encoders import tiny_embedder
from tests.support.fake_core import FakeCore
from tests.support.models import make_model, save_model
from tests.support.text_requests import collect, text_request
from tests.support.tokenizer import write_tokenizer


def source(folder: Path, weights: int) -> ModelSource:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return ModelSource(folder, str(folder), (folder.name,))


def test_engines_divide_what_the_weights_of_all_leave_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda: 10_000)
    small, large = source(tmp_path / "small", 1000), source(tmp_path / "large", 5000)
    assert host_share([small, large]) == MemoryShare(2000)
    assert host_share([small]) is None
    assert host_share([large, source(tmp_path / "huge", 9000)]) == MemoryShare(0)


def test_models_without_a_kv_cache_take_no_share_of_a_gpu(tmp_path: Path) -> None:
    llama = read_model_config(save_model(make_model("llama", num_hidden_layers=1), tmp_path / "llama"))
    embedder = read_model_config(tiny_embedder(tmp_path / "embedder"))
    sources = [source(tmp_path / name, size) for name, size in (("a", 100), ("b", 20), ("c", 3))]
    assert gpu_share(sources, [llama, embedder, llama], 0) == MemoryShare(0, engines=2, weights=23)
    assert gpu_share(sources[1:], [embedder, llama], 7) == MemoryShare(0, engines=1, weights=3, steps=7)
    assert gpu_share(sources[2:], [llama], 7) == MemoryShare(0, engines=1, weights=0, steps=7)
    assert gpu_share(sources[2:], [embedder], 7).engines == 1


STEP_BYTES = {"a": 10, "b": 200, "c": 3000}


class FakeEngine:
    """Records when engines start, and when the server waits for them."""

    log: ClassVar[list[str]] = []
    shares: ClassVar[list[MemoryShare | None]] = []
    later_shares: ClassVar[list[MemoryShare]] = []
    broken = ""

    def __init__(self, of: ModelSource, _: Any, settings: Serve, share: MemoryShare | None, *more: object) -> None:
        self.name, self.client = of.names[0], self
        self.log.append(f"start {self.name}")
        self.shares.append(share)

    def set_memory_share(self, share: MemoryShare) -> None:
        self.later_shares.append(share)

    async def ready(self) -> Any:
        self.log.append(f"wait {self.name}")
        if self.name == self.broken:
            raise EngineDead("no memory")
        return SimpleNamespace(step_bytes=STEP_BYTES[self.name])


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModelSource]:
    monkeypatch.setattr(engines, "RunningEngine", FakeEngine)
    for name, value in (("log", []), ("shares", []), ("later_shares", []), ("broken", "")):
        monkeypatch.setattr(FakeEngine, name, value)
    return [source(tmp_path / name, 100) for name in "abc"]


async def started(sources: list[ModelSource], **options: Any) -> int:
    configs: Any = SimpleNamespace(next=lambda: SimpleNamespace(spec=None))
    return len([engine async for engine in start_engines(Serve(**options), sources, configs)])


@pytest.mark.parametrize("own_processes", [False, True])
async def test_engines_on_a_gpu_load_one_after_the_other(
    sources: list[ModelSource], own_processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "uses_gpu", lambda _: True)
    assert await started(sources, engine_process=own_processes) == 3
    assert FakeEngine.log == ["start a", "wait a", "start b", "wait b", "start c", "wait c"]
    steps = (0, 0) if own_processes else (10, 210)
    assert FakeEngine.shares == [
        MemoryShare(0, 3, 200, 0),
        MemoryShare(0, 2, 100, steps[0]),
        MemoryShare(0, 1, 0, steps[1]),
    ]
    # An engine that is started again leaves room for the steps of all others, also of those that were built after it.
    others = (0, 0, 0) if own_processes else (3200, 3010, 210)
    assert FakeEngine.later_shares == [MemoryShare(0, 1, 0, steps) for steps in others]


async def test_an_engine_is_started_again_with_its_new_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[MemoryShare | None] = []

    def serve(config: CoreConfig, address: str, observer: object) -> None:
        used.append(config.memory_share)
        FakeCore(die_at_step=1)(address)

    monkeypatch.setattr(build, "serve_core", serve)
    folder = save_model(make_model("llama", num_hidden_layers=1), tmp_path)
    write_tokenizer(folder)
    share = MemoryShare(0, engines=2, weights=23)
    engine = RunningEngine(ModelSource(folder, str(folder), ("a",)), read_model_config(folder), Serve(), share)
    try:
        await engine.ready()
        engine.set_memory_share(MemoryShare(0, steps=7))
        with pytest.raises(EngineDead, match="told to die"):
            await collect(engine.client, text_request())
        await engine.restart()
    finally:
        await engine.stop()
    assert used == [share, MemoryShare(0, steps=7)]


async def test_no_engine_starts_after_one_that_fails(
    sources: list[ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "uses_gpu", lambda _: True)
    monkeypatch.setattr(FakeEngine, "broken", "b")
    with pytest.raises(EngineDead, match="no memory"):
        await started(sources)
    assert FakeEngine.log == ["start a", "wait a", "start b", "wait b"]


async def test_engines_on_cpus_load_at_once(sources: list[ModelSource]) -> None:
    assert await started(sources, device="cpu") == 3
    assert FakeEngine.log == ["start a", "start b", "start c"]
    assert len({share.host_bytes for share in FakeEngine.shares if share is not None}) == 1


async def test_a_single_engine_has_all_memory(sources: list[ModelSource]) -> None:
    assert await started(sources[:1]) == 1
    assert FakeEngine.shares == [None]

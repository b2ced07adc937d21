"""What is closed if an engine is not wanted any more, or fails, before it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import LoadingStopped, build_core
from quire.engine.client.protocol import Shutdown
from quire.engine.execution.devices.host import ReferenceDevice
from quire.engine.execution.executor import BackgroundExecutor, Executor, ParallelExecutor
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import read_model_config
from tests.support.encoders import tiny_embedder
from tests.support.engine import Channel, Engine, greedy, random_prompt
from tests.support.models import make_model, save_model


class WarmingDevice(ReferenceDevice):
    """Has a warm-up, as GPUs have."""

    compiles_kernels = True


class ImpatientFrontEnd(Channel):
    """Ask the core to stop during the warm-up."""

    impatient = False

    def receive_arrived(self, *_: type) -> Any:
        return Shutdown() if self.impatient else None


def build(folder: Path, channel: Channel) -> None:
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder),
        model=ModelOptions(),
        engine=EngineOptions(kv_cache_memory_bytes=1 << 20, max_num_seqs=4, max_num_batched_tokens=32),
    )
    build_core(config, channel, WarmingDevice())  # type: ignore[arg-type]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of what is closed."""
    log: list[type] = []
    for owner in (BackgroundExecutor, ParallelExecutor, GrammarCompiler):
        original: Any = owner.close

        def close(self: Any, original: Any = original) -> None:
            log.append(type(self))
            original(self)

        monkeypatch.setattr(owner, "close", close)
    return log


def patch_submit(monkeypatch: pytest.MonkeyPatch, kind: type[Executor], before: Any) -> None:
    original = kind.submit

    def submit(self: Any, plan: Any) -> Any:
        before()
        return original(self, plan)

    monkeypatch.setattr(kind, "submit", submit)


@pytest.mark.parametrize("encoder", [False, True])
def test_an_interrupted_warm_up_leaves_nothing_open(
    encoder: bool, tmp_path: Path, closed: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_embedder(tmp_path) if encoder else save_model(make_model("llama", num_hidden_layers=1), tmp_path)
    channel = ImpatientFrontEnd()
    patch_submit(
        monkeypatch, ParallelExecutor if encoder else BackgroundExecutor, lambda: setattr(channel, "impatient", True)
    )
    with pytest.raises(LoadingStopped):
        build(folder, channel)
    assert closed == ([ParallelExecutor] if encoder else [BackgroundExecutor, GrammarCompiler])


def test_a_failed_warm_up_leaves_nothing_open(
    tmp_path: Path, closed: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    patch_submit(monkeypatch, BackgroundExecutor, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        build(save_model(make_model("llama", num_hidden_layers=1), tmp_path), Channel())
    assert closed == [BackgroundExecutor, GrammarCompiler]


def test_a_cache_of_the_models_own_type_can_be_asked_for_by_name(tmp_path: Path) -> None:
    """As of vLLM, whose cache may have another type than the model."""
    folder = save_model(make_model("llama"), tmp_path / "model")
    model = ModelOptions(device="reference", dtype="bfloat16")
    greedy_tokens = Engine(folder, model=model).generate(random_prompt(1, 5), greedy(4)).tokens
    named = Engine(folder, model=model, kv_cache_dtype="bfloat16")
    assert named.generate(random_prompt(1, 5), greedy(4)).tokens == greedy_tokens
    message = "--kv-cache-dtype bfloat16 needs a model that runs in bfloat16 .*, this one runs in float32; auto"
    with pytest.raises(UnsupportedModel, match=message):
        Engine(folder, model=ModelOptions(device="reference", dtype="float32"), kv_cache_dtype="bfloat16")

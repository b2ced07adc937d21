"""Tokens do not depend on whether blocks were computed or read from the disk, whatever the cache has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.scheduling.scheduler import Scheduler
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.host_tier import AlwaysLoads
from tests.support.invariance import alone, together, workload
from tests.support.models import make_model, save_model
from tests.support.variants import covering, slow_but

# One of each kind of cache: plain, windows in some layers, latent, keys that change when a sequence has become long.
CASES = ("llama", "gemma2", "deepseek_v3", "phi3-longrope")
VARIANTS: list[dict[str, Any]] = [{}, {"in_flight": 2, "max_num_batched_tokens": 7, "max_num_seqs": 4}]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param, num_hidden_layers=2), tmp_path_factory.mktemp("model"))


@contextmanager
def engine_of(folder: Path, tier: Path, **options: Any) -> Iterator[Engine]:
    options = {"block_size": 4, **options}
    engine = Engine(folder, kv_offloading_disk_size=1, kv_offloading_path=tier, **options)
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, Scheduler)
    assert scheduler.loads is not None
    scheduler.loads.rule = AlwaysLoads(1)
    try:
        yield engine
    finally:
        engine.core.close()


def loaded(engine: Engine) -> int:
    """Prompt tokens that were read from the disk."""
    return sum(result.outputs[-1].loaded_tokens for result in engine.results.values() if result.outputs)


@pytest.mark.parametrize(("folder", "variant"), covering(CASES, VARIANTS), indirect=["folder"])
def test_tokens_after_a_restart_are_the_same(folder: Path, tmp_path: Path, variant: dict[str, Any]) -> None:
    with engine_of(folder, tmp_path, **variant) as before:
        assert together(before, workload(1), 1) == alone(folder, 1)
    with engine_of(folder, tmp_path, **variant) as after:
        assert together(after, workload(1), 1) == alone(folder, 1)
        assert loaded(after) > 100


@pytest.mark.parametrize("folder", slow_but(CASES, "gemma2"), indirect=True)
def test_tokens_are_the_same_where_blocks_leave_memory_and_come_back(folder: Path, tmp_path: Path) -> None:
    """The cache has so few blocks that sequences preempt each other, and nothing stays for long."""
    model = ModelOptions(max_model_len=104)
    with engine_of(folder, tmp_path / "roomy", model=model) as roomy:
        memory = 26 * roomy.block_bytes
    with engine_of(folder, tmp_path, model=model, kv_cache_memory_bytes=memory) as engine:
        for _ in range(2):
            assert together(engine, workload(3), 3) == alone(folder, 3)
        assert engine.preemptions > 0
        assert loaded(engine) > 0


@pytest.mark.parametrize(("folder", "dtype"), covering(CASES, ["int8", "bfloat16"]), indirect=["folder"])
def test_pages_are_the_same_bytes(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Log probabilities are those of a prefix in memory, with int8 pages, which have scales, and with 16 bits."""
    model = ModelOptions(dtype="bfloat16" if dtype == "bfloat16" else "float32")
    options: dict[str, Any] = {"model": model, "kv_cache_dtype": dtype}
    prompt, params = random_prompt(1, 90), greedy(12, logprobs=3)
    with engine_of(folder, tmp_path, **options) as before:
        before.generate(prompt, params)
        expected = before.generate(prompt, params)
    with engine_of(folder, tmp_path, **options) as after:
        result = after.generate(prompt, params)
        assert loaded(after) == result.outputs[0].cached_tokens == 88
    assert [output.logprobs for output in result.outputs] == [output.logprobs for output in expected.outputs]

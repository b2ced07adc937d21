"""Host memory as a tier: tokens do not depend on it, whenever the device makes its copies, and its bound is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.build import tier as build_tier
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.host_blocks import HostBlocks
from quire.engine.models.errors import UnsupportedModel
from quire.engine.tiers.published import PublishedBlocks
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.host_tier import DeviceWithMemory, LateCopies, host_engine, tier_of
from tests.support.invariance import alone, together, workload
from tests.support.models import make_model, save_model
from tests.support.variants import covering, slow_but

# One of each kind of cache: plain, windows in some layers, latent, keys that change when a sequence has become long.
CASES = ("llama", "gemma2", "deepseek_v3", "phi3-longrope")
COPIES = (LateCopies, HostBlocks)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param, num_hidden_layers=2), tmp_path_factory.mktemp("model"))


def sizes(folder: Path, **options: Any) -> tuple[int, int]:
    """The bytes of a block, and those of one of each group of layers."""
    engine = Engine(folder, **{"block_size": 4, **options})
    try:
        return engine.info.cache_bytes // engine.info.num_blocks, engine.block_bytes
    finally:
        engine.core.close()


def loaded(engine: Engine) -> int:
    """Prompt tokens that came back from the tiers."""
    return sum(result.outputs[-1].loaded_tokens for result in engine.results.values() if result.outputs)


@pytest.mark.parametrize(("folder", "copies", "rows"), covering(CASES, COPIES, [400, 7]), indirect=["folder"])
@pytest.mark.parametrize("in_flight", slow_but([1, 2], 2))
def test_tokens_are_the_same_where_blocks_leave_the_device_and_come_back(
    folder: Path, copies: type[HostBlocks], rows: int, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has so few blocks that sequences preempt each other; requests are aborted while they wait."""
    monkeypatch.setattr(build_tier, "HostBlocks", copies)
    model = ModelOptions(max_model_len=104)
    block, of_groups = sizes(folder, model=model)
    options: dict[str, Any] = {"model": model, "kv_cache_memory_bytes": 26 * of_groups, "in_flight": in_flight}
    with host_engine(folder, rows, block, **options) as engine:
        for _ in range(2):
            assert together(engine, workload(3), 3) == alone(folder, 3)
        assert engine.preemptions > 0
        tier = tier_of(engine)
        assert 0 < len(tier._index) <= rows
        if rows > 100:
            assert loaded(engine) > 0
        if isinstance(tier._copies, LateCopies):
            assert tier._copies.held_steps > 0
        tier.settle()
        tier.check()
        assert not tier._index.uses


@pytest.mark.parametrize("folder", slow_but(CASES, "gemma2"), indirect=True)
def test_files_keep_what_leaves_host_memory(folder: Path, tmp_path: Path) -> None:
    """Blocks come back from them through host memory, also after a restart."""
    block, of_groups = sizes(folder)
    options: dict[str, Any] = {
        "kv_offloading_disk_size": 1,
        "kv_offloading_path": tmp_path,
        "model": ModelOptions(max_model_len=104),
        "kv_cache_memory_bytes": 26 * of_groups,
    }
    with host_engine(folder, 9, block, **options) as engine:
        for _ in range(2):
            assert together(engine, workload(3), 3) == alone(folder, 3)
        assert loaded(engine) > 0
    with host_engine(folder, 9, block, **options) as engine:
        assert together(engine, workload(3), 3) == alone(folder, 3)
        assert loaded(engine) > 0
        assert engine.hits["disk"] > 0


@pytest.mark.parametrize(("folder", "dtype"), covering(CASES, ["int8", "bfloat16"]), indirect=["folder"])
def test_pages_are_the_same_bytes(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities are those of a prefix on the device, with int8 pages, which have scales, and with 16 bits."""
    monkeypatch.setattr(build_tier, "HostBlocks", LateCopies)
    model = ModelOptions(dtype="bfloat16" if dtype == "bfloat16" else "float32", max_model_len=104)
    options: dict[str, Any] = {"model": model, "kv_cache_dtype": dtype}
    block, of_groups = sizes(folder, **options)
    prompt, params = random_prompt(1, 90), greedy(12, logprobs=3)
    with host_engine(folder, 200, block, kv_cache_memory_bytes=27 * of_groups, **options) as engine:
        engine.generate(prompt, params)
        expected = engine.generate(prompt, params)
        for seed in range(2, 5):
            engine.generate(random_prompt(seed, 90), params)
        before = loaded(engine)
        result = engine.generate(prompt, params)
        assert loaded(engine) - before > 40
        assert result.outputs[0].cached_tokens == 88
    assert [output.logprobs for output in result.outputs] == [output.logprobs for output in expected.outputs]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("copies", COPIES)
def test_blocks_of_other_weights_and_forgotten_ones_are_not_found(
    folder: Path, copies: type[HostBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tier, "HostBlocks", copies)
    prompt, params = random_prompt(1, 90), greedy(2)
    block, _ = sizes(folder)
    with host_engine(folder, 200, block) as engine:
        for forget in (tier_of(engine).clear, tier_of(engine).weights_replaced):
            engine.generate(prompt, params)
            engine.core.scheduler.reset_prefix_cache(preempt=True)  # type: ignore[union-attr]
            assert engine.generate(prompt, params).outputs[0].loaded_tokens == 88
            forget()
            engine.core.scheduler.reset_prefix_cache(preempt=True)  # type: ignore[union-attr]
            assert engine.generate(prompt, params).outputs[0].cached_tokens == 0
            tier_of(engine).check()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_block_that_may_hold_nan_is_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forgotten while it is being copied."""
    monkeypatch.setattr(build_tier, "HostBlocks", LateCopies)
    prompt, params = random_prompt(1, 90), greedy(2)
    block, _ = sizes(folder)
    with host_engine(folder, 200, block) as engine:
        engine.generate(prompt, params)
        tier = tier_of(engine)
        first = tier._index.known()[0]
        tier.evict([first])
        assert not tier.has(first)
        engine.core.scheduler.reset_prefix_cache(preempt=True)  # type: ignore[union-attr]
        assert engine.generate(prompt, params).outputs[0].cached_tokens == 0
        tier.settle()
        tier.check()


@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
@pytest.mark.parametrize("on_disk", [False, True])
def test_followers_are_told_what_the_memory_has(folder: Path, tmp_path: Path, on_disk: bool) -> None:
    block, of_groups = sizes(folder)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 26 * of_groups, "model": ModelOptions(max_model_len=104)}
    if on_disk:
        options |= {"kv_offloading_disk_size": 1, "kv_offloading_path": tmp_path}
    told: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    class Follower:
        def tier_changed(self, source: str, stored: list[bytes], removed: list[bytes]) -> None:
            told[source] |= set(stored)
            told[source] -= set(removed)

    with host_engine(folder, 30, block, **options) as engine:
        tier, offload = tier_of(engine), engine.core._offload
        assert offload is not None
        tier._published = PublishedBlocks()
        offload._observer = Follower()  # type: ignore[assignment]
        together(engine, workload(3), 3)
        engine.core._report_idle()
        assert told["host"]
        assert told["host"] == set(tier._index.known())


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_settings_that_cannot_work_are_refused(folder: Path, tmp_path: Path) -> None:
    for options, text in (
        ({"kv_offloading_size": 1}, "--kv-offloading-size is for GPUs: .* --kv-offloading-disk-size keeps blocks"),
        (
            {"device": DeviceWithMemory(), "kv_offloading_disk_size": 1, "kv_offloading_path": tmp_path},
            "--kv-offloading-disk-size needs --kv-offloading-size",
        ),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "needs --enable-prefix-caching"),
    ):
        with pytest.raises(UnsupportedModel, match=text):
            Engine(folder, **options)
    for size, text in ((1e-9, "room for two KV blocks"), (1 << 20, "of the host's memory")):
        with pytest.raises(OutOfCacheMemory, match=text):
            Engine(folder, device=DeviceWithMemory(), kv_offloading_size=size)

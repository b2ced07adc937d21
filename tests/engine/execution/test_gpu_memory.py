"""How engines that are built one after the other divide the memory of a GPU. The GPU is made of numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from quire.engine.execution.gpu_memory import GpuMemory, gpu_cache_memory
from quire.engine.execution.memory import MemoryShare

TOTAL, UTILIZATION, CONTEXT = 80_000, 0.9, 500  # `CONTEXT`: of CUDA, in each process


@dataclass(frozen=True)
class Model:
    """Bytes of a model: weights, graphs, and intermediate results of its largest step; and of its files."""

    weights: int
    graphs: int = 0
    steps: int = 0
    files: int | None = None
    has_cache: bool = True

    @property
    def in_files(self) -> int:
        return self.weights if self.files is None else self.files


@dataclass
class FakeGpu:
    """A GPU on which engines are built, all in one process or each in its own.

    Attributes:
        others: bytes of other programs.
        held: bytes that each engine holds; pools: bytes of graphs, which PyTorch has reserved, but no tensor has.
    """

    one_process: bool
    others: int = 0
    held: list[int] = field(default_factory=list)
    pools: list[int] = field(default_factory=list)

    def measured(self, model: Model) -> tuple[GpuMemory, GpuMemory]:
        """What the engine measures that is being built."""
        here = self.held if self.one_process else []
        pools = self.pools if self.one_process else []
        elsewhere = 0 if self.one_process else sum(self.held) + sum(self.pools) + CONTEXT * len(self.held)
        allocated = sum(here) + model.weights
        reserved = allocated + sum(pools)
        outside = self.others + CONTEXT + elsewhere
        before = GpuMemory(TOTAL, TOTAL - outside - reserved, reserved, allocated, allocated)
        peak = allocated + model.steps
        after = GpuMemory(TOTAL, before.free - model.steps, reserved + model.steps, allocated, peak)
        return before, after

    def build(self, models: list[Model]) -> list[int]:
        """Build engines as `start_engines` does; returns the sizes of their KV caches."""
        caches, steps = [], 0
        for index, model in enumerate(models):
            cache = 0
            if model.has_cache:
                later = models[index + 1 :]
                engines = sum(model.has_cache for model in models[index:])
                share = MemoryShare(0, engines, sum(model.in_files for model in later), steps)
                before, after = self.measured(model)
                cache = gpu_cache_memory(before, after, UTILIZATION, share if len(models) > 1 else None)
                steps += model.steps if self.one_process else 0
            caches.append(cache)
            self.held.append(model.weights + cache + (0 if self.one_process else model.steps))
            self.pools.append(model.graphs)
        return caches


def test_a_single_engine_takes_what_is_left() -> None:
    model = Model(weights=16_000, steps=3000)
    assert FakeGpu(one_process=True, others=700).build([model]) == [72_000 - 700 - 500 - 16_000 - 3000]


MODELS = (
    Model(weights=16_000, graphs=600, steps=3000),
    Model(weights=1000, graphs=200, steps=1500),
    Model(weights=8000, graphs=400, steps=100, files=15_000),  # quantized while it is loaded
    Model(weights=400, has_cache=False),
)


@pytest.mark.parametrize("one_process", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_engines_fit_in_any_order(one_process: bool, count: int) -> None:
    """Also when the largest steps of all of them run at once; beside them there is room for the last one's graphs."""
    for models in itertools.permutations(MODELS, count):
        gpu = FakeGpu(one_process, others=2000)
        caches = gpu.build([*models])
        last = max(index for index, model in enumerate(models) if model.has_cache)  # that measures
        contexts = CONTEXT * (1 if one_process else last + 1)
        steps = sum(model.steps for model in models) if one_process else 0
        used = gpu.others + contexts + sum(gpu.held) + sum(gpu.pools) + steps
        assert used - models[last].graphs <= TOTAL * UTILIZATION
        assert all((cache > 5000) == model.has_cache for cache, model in zip(caches, models, strict=True))


@pytest.mark.parametrize("one_process", [True, False])
def test_equal_models_get_about_equal_caches(one_process: bool) -> None:
    """The earlier ones cannot know the graphs and the intermediate results of the later ones."""
    first, second, third = FakeGpu(one_process).build([Model(weights=10_000, graphs=100, steps=900)] * 3)
    assert first > second > third > 0.8 * first


def test_what_is_too_large_leaves_nothing() -> None:
    assert FakeGpu(one_process=True).build([Model(50_000), Model(30_000)]) == [0, 0]

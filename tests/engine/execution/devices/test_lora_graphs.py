"""Graphs of a model with an adapter: one serves any mix of rows with and without it, also after a sleep."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.config.options import ModelOptions
from quire.engine.client.protocol import MemoryTag, SleepLevel, Wake
from quire.engine.execution.cuda_graphs import GraphSteps
from quire.engine.models.layers import linear
from quire.engine.models.layers.linear import LoRA
from quire.kernels.lora import SortedRows, add_lora
from tests.support.audio_models import make_audio_model, noise, prompt_with, save_audio_model
from tests.support.engine import Engine, greedy
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.triton_device import gpu_device

HEAD = [5, 9, 7, 8]
# Parts of the prompts of requests, of which some have audio, and their numbers of tokens.
REQUESTS: list[tuple[list[Any], int]] = [
    ([HEAD], 9),
    ([HEAD, noise(0, 0.3), [4]], 6),
    ([[7]], 4),
    ([[3], noise(1, 0.2)], 3),
]
SMALL: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "cudagraph_capture_sizes": (2, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_audio_model("granite_speech", text={"num_hidden_layers": 1})
    return save_audio_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens of each request alone on the CPU's reference device."""
    engine = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    return [together(engine, [index])[0] for index in range(len(REQUESTS))]


def together(engine: Engine, indices: list[int]) -> list[list[int]]:
    """Run some of the requests at once."""
    names = {index: f"{len(engine.results)}-{index}" for index in indices}
    for index, name in names.items():
        parts, tokens = REQUESTS[index]
        prompt, items = prompt_with(engine.audio, *parts)
        engine.add(name, prompt, greedy(tokens), items=items)
    engine.run()
    return [engine.results[name].tokens for name in names.values()]


class Watched:
    """Count the decode steps of an engine by what computes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.eager, self.adapted, self.plain = 0, set[int](), set[int]()
        inner = GraphSteps.logits

        def logits(steps: Any, inputs: Any, attention: Any) -> Tensor:
            if inputs.static:
                graphs = steps.graphs if inputs.model.lora_ids is None else steps.lora_graphs
                self.eager += inputs.num_tokens not in graphs
                lora_ids = inputs.model.lora_ids
                (self.plain if lora_ids is None else self.adapted).add(
                    0 if lora_ids is None else int((lora_ids.tokens >= 0).sum())
                )
            return inner(steps, inputs, attention)

        monkeypatch.setattr(GraphSteps, "logits", logits)


def test_one_graph_serves_any_mix(folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    engine = Engine(folder, device=gpu_device(), **SMALL)
    steps = engine.runner.steps
    assert sorted(steps.graphs) == sorted(steps.lora_graphs) == [2, 4]
    for mix in ([0, 1, 2, 3], [1, 3], [0, 2], [1]):
        assert together(engine, mix) == [expected[index] for index in mix]
    assert watched.eager == 0
    assert watched.adapted == {1, 2}  # rows with the adapter, beside others and alone
    assert watched.plain == {0}


def test_the_same_tokens_without_graphs(folder: Path, expected: list[list[int]]) -> None:
    """Steps that are not padded, in chunks, with rows of logits that differ from those of tokens."""
    engine = Engine(folder, device=gpu_device(), **SMALL, enforce_eager=True, max_num_batched_tokens=16)
    assert together(engine, [0, 1, 2, 3]) == expected


def test_a_model_without_an_adapter_has_half_as_many_graphs(folder: Path, tmp_path: Path) -> None:
    folder_without = save_audio_model(make_audio_model("granite_speech", text={"num_hidden_layers": 1}), tmp_path)
    (folder_without / "adapter_config.json").unlink()
    steps = Engine(folder_without, device=gpu_device(), **SMALL).runner.steps
    assert sorted(steps.graphs) == [2, 4]
    assert steps.lora_graphs == {}


WAKE_UPS: dict[str, list[frozenset[MemoryTag]]] = {
    "at once": [ALL],
    "weights first": [frozenset(("weights",)), frozenset(("kv_cache",))],
    "cache first": [frozenset(("kv_cache",)), frozenset(("weights",))],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "order"),
    [(1, "cache first"), (2, "at once"), (2, "weights first")],
)
def test_graphs_read_the_adapter_that_was_loaded_last(
    folder: Path, expected: list[list[int]], level: SleepLevel, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2 frees the adapter and loads it again, so its weights are elsewhere then."""
    read: set[int] = set()

    def spy(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, rows: SortedRows) -> Tensor:
        read.update((lora_a.data_ptr(), lora_b.data_ptr()))
        return add_lora(y, x, lora_a, lora_b, rows)

    monkeypatch.setattr(linear, "add_lora", spy)
    options = {**SMALL, "cudagraph_capture_sizes": (2,), "max_num_seqs": 2}
    engine = Engine(folder, device=gpu_device(), enable_sleep_mode=True, **options)
    assert together(engine, [0, 1]) == expected[:2]
    old = [weakref.ref(graph) for graph in (engine.runner.steps.graphs[2], engine.runner.steps.lora_graphs[2])]
    adapter = weakref.ref(next(module for module in engine.model.modules() if isinstance(module, LoRA)))
    del engine.runner
    sleep(engine, level)
    assert [graph() for graph in old] == [None, None]
    assert (adapter() is None) == (level == 2)
    read.clear()
    for tags in WAKE_UPS[order]:
        state = answer(engine, Wake(tags))
    assert state == AWAKE
    executor: Any = engine.core.executor
    steps, model = executor._runner.steps, executor._runner.model
    adapters = [module for module in model.modules() if isinstance(module, LoRA)]
    weights = [weight for module in adapters for weight in (module.lora_a, module.lora_b)]
    assert read == {weight.data_ptr() for weight in weights if weight is not None}  # while graphs were captured
    assert list(steps.lora_graphs) == [2]
    assert together(engine, [0, 1]) == expected[:2]

"""Models with the gated delta rule: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.families import (
    SCHEDULED,
    check_bits,
    check_log_probabilities,
    check_ranks,
    check_refused,
    check_schedule,
)
from tests.support.models import DELTA_NETS, make_model, save_model
from tests.support.variants import covering, slow_but

KINDS = ("qwen3_next", "olmo_hybrid", "kimi_linear")  # experts and gates, states that turn, decays of channels
FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    """Two layers: one with the delta rule, and then attention."""
    return make_model(case, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda case: save_model(model_of(case), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        [(case, device) for case in DELTA_NETS for device in ("cpu", "reference")],
        *((case, "cpu") for case in DELTA_NETS),
        *((case, "reference") for case in KINDS),
    ),
)
def test_engine_equals_transformers(folder_of: FolderOf, case: str, device: Any) -> None:
    """Greedy tokens and their log-probabilities, behind prompts that are longer than a chunk of either."""
    check_log_probabilities(model_of(case), folder_of(case), device)


@pytest.mark.parametrize(("case", "schedule"), covering(KINDS, SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    check_schedule(folder_of(case), Engine(folder_of(case), **schedule))


def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf) -> None:
    """States of the other kinds are larger: fewer sequences run, and all their blocks fit."""
    folder = folder_of("qwen3_next")
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder, model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folder, model=model, block_size=4, kv_cache_memory_bytes=size)
    check_schedule(folder, engine)
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    [
        ("qwen3_next", {"tensor_parallel_size": 2}),
        ("kimi_linear", {"pipeline_parallel_size": 2}),
        pytest.param("kimi_linear", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("olmo_hybrid", {"tensor_parallel_size": 2}),
        pytest.param("olmo_hybrid", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_the_ranks(folder_of: FolderOf, case: str, parallel: dict[str, int]) -> None:
    """Ranks of a stage have some of the heads each."""
    check_ranks(folder_of(case), parallel)


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    check_bits(folder_of(case), quantization)


@pytest.mark.skipif(native.instructions() is None, reason="only calls of the compiled kernels can be captured")
def test_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of heads rotated that are as large as in published models, by their kernels."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    folder = save_model(make_model("qwen3_5", head_dim=64, rope_parameters=rope).bfloat16(), tmp_path)

    def tokens() -> tuple[list[list[int]], StepGraphs]:
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), max_num_seqs=3, max_num_batched_tokens=16)
        for number in range(5):
            engine.add(str(number), random_prompt(number, 1 + 9 * number), greedy(8 + 7 * (number % 3)))
            engine.step()
        engine.run()
        return [engine.results[str(number)].tokens for number in range(5)], engine.runner.steps

    replayed, graphs = tokens()
    assert len(graphs.graphs) == 2  # of decode steps, and of those with chunks of prompts
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens()[0] == replayed


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention"]}, "type 'sliding_attention' are not"),
        ("qwen3_5", {"hidden_act": "gelu"}, "with 'gelu' are not supported"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "value heads, 4, is not a multiple of the 3 key heads"),
        ("olmo_hybrid", {"linear_conv_kernel_dim": 1}, "1 taps, but must have at least 2"),
    ],
)
def test_configs_that_are_not_supported_are_refused(
    folder_of: FolderOf, case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(model_of(case), folder_of(case), changes, message, tmp_path)

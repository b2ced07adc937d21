"""Models with the gated delta rule: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import native
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.invariance import SCHEDULES, together, workload
from tests.support.models import DELTA_NETS, make_model, save_model
from tests.support.variants import covering, slow_but

SEED = 1
KINDS = ("qwen3_next", "olmo_hybrid", "kimi_linear")  # experts and gates, states that turn, decays of channels
FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    """Two layers: one with the delta rule, and then attention."""
    return make_model(case, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda case: save_model(model_of(case), tmp_path_factory.mktemp("model")))


@cache
def alone(folder: Path) -> list[list[int]]:
    engine = Engine(folder, enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in workload(SEED)]


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
    engine = Engine(folder_of(case), model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    for seed, length in ((1, 5), (2, 140)):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(16, logprobs=20))
        with torch.inference_mode():
            sequence = torch.tensor([[*prompt, *result.tokens[:-1]]])
            logits = model_of(case)(sequence, use_cache=False).logits[0, length - 1 :].float()
        assert result.tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)
        for step, output in enumerate(result.outputs):
            assert output.logprobs is not None
            ids, values = output.logprobs[0].token_ids, torch.tensor(output.logprobs[0].logprobs)
            assert ((values - expected[step][ids]).abs().max() / logits[step].abs().max()).item() < 1e-4


SCHEDULED: list[dict[str, Any]] = [
    SCHEDULES["small chunks"],
    SCHEDULES["speculation"],
    {"in_flight": 2, "block_size": 4},
]


@pytest.mark.parametrize(("case", "schedule"), covering(KINDS, SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    engine = Engine(folder_of(case), **schedule)
    assert together(engine, workload(SEED), SEED) == alone(folder_of(case))


def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf) -> None:
    """States of the other kinds are larger: fewer sequences run, and all their blocks fit."""
    folder = folder_of("qwen3_next")
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder, model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folder, model=model, block_size=4, kv_cache_memory_bytes=size)
    assert together(engine, workload(SEED), SEED) == alone(folder)
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
    engine = Engine(folder_of(case), parallel=ParallelOptions(**parallel))
    try:
        assert together(engine, workload(SEED), SEED) == alone(folder_of(case))
    finally:
        engine.core.close()


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    make = partial(Engine, folder_of(case), model=ModelOptions(dtype="bfloat16", quantization=quantization))
    requests = [(random_prompt(seed, 5 + 17 * seed), greedy(12, logprobs=3)) for seed in range(4)]
    batch, single = make(max_num_batched_tokens=16), make()
    for index, request in enumerate(requests):
        batch.add(f"r{index}", *request)
    batch.run()
    for index, request in enumerate(requests):
        outputs = zip(batch.results[f"r{index}"].outputs, single.generate(*request).outputs, strict=True)
        assert all(beside_others.logprobs == by_itself.logprobs for beside_others, by_itself in outputs)


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
    config = type(model_of(case).config).from_pretrained(folder_of(case))
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, model_impl="quire")

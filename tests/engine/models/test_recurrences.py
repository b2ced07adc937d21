"""RecurrentGemma, MiniMax and Zamba 2: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import native
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.invariance import SCHEDULES, together, workload
from tests.support.models import RECURRENCES, make_model, save_model
from tests.support.variants import covering, slow_but

SEED = 1
KINDS = ("recurrent_gemma", "minimax", "zamba2-plain")
FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    return make_model(case)


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
        [(case, device) for case in RECURRENCES for device in ("cpu", "reference")],
        *((case, "cpu") for case in RECURRENCES),
    ),
)
def test_engine_equals_transformers(folder_of: FolderOf, case: str, device: Any) -> None:
    """Greedy tokens and their log-probabilities, behind prompts that are longer than a chunk and a window.

    Zamba 2 amplifies errors: its log-probabilities may be twice as far from those in float64 as transformers'.
    """
    engine = Engine(folder_of(case), model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    exact_model = deepcopy(model_of(case)).double() if case.startswith("zamba2") else model_of(case)
    for seed, length in ((1, 5), (2, 140)):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(16, logprobs=20))
        with torch.inference_mode():
            sequence = torch.tensor([[*prompt, *result.tokens[:-1]]])
            logits, exact = (
                model(sequence, use_cache=False).logits[0, length - 1 :] for model in (model_of(case), exact_model)
            )
        assert result.tokens == logits.argmax(-1).tolist()
        scale = exact.abs().amax(-1)
        tolerance = 1e-4 + 2 * ((logits - exact).abs().amax(-1) / scale).max()
        expected = exact.log_softmax(-1)
        for step, output in enumerate(result.outputs):
            assert output.logprobs is not None
            ids, values = output.logprobs[0].token_ids, torch.tensor(output.logprobs[0].logprobs)
            assert (values - expected[step][ids]).abs().max() / scale[step] < tolerance


SCHEDULED: list[dict[str, Any]] = [
    SCHEDULES["small chunks"],
    SCHEDULES["speculation"],
    {"in_flight": 2, "block_size": 4},
]


@pytest.mark.parametrize(("case", "schedule"), covering(KINDS, SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    engine = Engine(folder_of(case), **schedule)
    assert together(engine, workload(SEED), SEED) == alone(folder_of(case))


@pytest.mark.parametrize("case", slow_but(["minimax", "zamba2-plain"], "minimax"))
def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf, case: str) -> None:
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder_of(case), model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folder_of(case), model=model, block_size=4, kv_cache_memory_bytes=size)
    assert together(engine, workload(SEED), SEED) == alone(folder_of(case))
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    [
        ("minimax", {"tensor_parallel_size": 2}),
        ("recurrent_gemma", {"pipeline_parallel_size": 2}),
        pytest.param("minimax", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("recurrent_gemma", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_the_ranks(folder_of: FolderOf, case: str, parallel: dict[str, int]) -> None:
    """Layers with a state are whole on each rank of a stage."""
    engine = Engine(folder_of(case), parallel=ParallelOptions(**parallel))
    try:
        assert together(engine, workload(SEED), SEED) == alone(folder_of(case))
    finally:
        engine.core.close()


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_blocks_that_layers_have_in_common_are_not_divided(folder_of: FolderOf, parallel: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"-parallel-size must be 1"):
        Engine(folder_of("zamba2-plain"), parallel=ParallelOptions(**parallel))


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


def test_weights_of_a_block_are_in_memory_once(tmp_path: Path) -> None:
    """A further layer with the same block adds its projections and its state space only."""
    sizes = {}
    for count in (1, 2):
        layers: dict[str, Any] = {"layers_block_type": ["hybrid"] * count, "num_hidden_layers": count}
        folder = save_model(make_model("zamba2-plain", **layers), tmp_path / str(count))
        sizes[count] = Engine(folder).info.weight_bytes
    hidden, inner, rank, size = 64, 96, 8, 4
    block = size * (3 * 128 * 128 + 128 * hidden + 3 * hidden * inner + 2 * hidden + hidden)
    added = sizes[2] - sizes[1]
    assert size * (hidden * rank + rank * 2 * inner + hidden * hidden) < added < block


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("recurrent_gemma", {"block_types": ["recurrent", "other"]}, "block_types has 'other'; supported are"),
        ("recurrent_gemma", {"lru_width": 66}, "66 channels of a recurrence cannot be split into 4 blocks"),
        ("minimax", {"layer_types": ["linear_attention", "sliding_attention"]}, "type 'sliding_attention' are not"),
        ("zamba2", {"use_long_context": True}, "use_long_context is not supported"),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks is 0, but must be at least 1"),
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

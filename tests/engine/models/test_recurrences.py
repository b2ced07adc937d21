"""RecurrentGemma, MiniMax and Zamba 2: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2.modeling_minimax_m2 import apply_rotary_pos_emb

from quire.config.options import ModelOptions
from quire.kernels import native
from tests.support.engine import Engine
from tests.support.families import (
    SCHEDULED,
    SEED,
    check_bits,
    check_log_probabilities,
    check_ranks,
    check_refused,
    check_schedule,
)
from tests.support.models import RECURRENCES, make_model, save_model
from tests.support.variants import covering, slow_but

KINDS = ("recurrent_gemma", "minimax", "zamba2-plain")
FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    return make_model(case)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda case: save_model(model_of(case), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        [(case, device) for case in RECURRENCES for device in ("cpu", "reference")],
        *((case, "cpu") for case in RECURRENCES),
    ),
)
def test_engine_equals_transformers(folder_of: FolderOf, case: str, device: Any) -> None:
    """Greedy tokens and their log-probabilities, behind prompts that are longer than a chunk and a window."""
    check_log_probabilities(model_of(case), folder_of(case), device)


def test_minimax_rotates_a_part_of_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `rotary_dim` elements, as the model's authors do it; transformers does it in MiniMax M2 only."""
    model = make_model("minimax", rotary_dim=8)
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    theta = model.config.rope_parameters["rope_theta"]
    model.model.rotary_emb.inv_freq = theta ** -(torch.arange(0, 8, 2) / 8)
    check_log_probabilities(model, save_model(model, tmp_path), "cpu")


@pytest.mark.parametrize(("case", "schedule"), covering(KINDS, SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    check_schedule(folder_of(case), Engine(folder_of(case), **schedule))


@pytest.mark.parametrize("case", slow_but(["minimax", "zamba2-plain"], "minimax"))
def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf, case: str) -> None:
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder_of(case), model=model, block_size=4)
    states = roomy.runner._states.slots.memory.numel()
    size = states + 27 * (roomy.info.cache_bytes - states) // roomy.info.num_blocks
    engine = Engine(folder_of(case), model=model, block_size=4, kv_cache_memory_bytes=size)
    check_schedule(folder_of(case), engine)
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    [
        ("minimax", {"tensor_parallel_size": 2}),
        ("recurrent_gemma", {"pipeline_parallel_size": 2}),
        ("zamba2", {"tensor_parallel_size": 2}),
        ("zamba2", {"pipeline_parallel_size": 2}),
        pytest.param("zamba2-plain", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("zamba2", {"pipeline_parallel_size": 5}, marks=pytest.mark.slow),
        pytest.param("zamba2", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("minimax", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("recurrent_gemma", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_the_ranks(folder_of: FolderOf, case: str, parallel: dict[str, int]) -> None:
    """Layers with a state may be whole on each rank of a stage. Stages may begin with layers whose block an earlier
    stage has as well, or have none with a block, and pass the embeddings on."""
    # In the first workload two neighbours among the tokens to choose from differ by no more than float32 rounds.
    check_ranks(folder_of(case), parallel, seed=2 if case == "zamba2-plain" else SEED)


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    check_bits(folder_of(case), quantization)


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
        ("minimax", {"rotary_dim": 7}, "rotary_dim must be an even number up to 16, the elements of a head, not 7"),
        ("minimax", {"layer_types": ["linear_attention", "sliding_attention"]}, "type 'sliding_attention' are not"),
        ("zamba2", {"use_long_context": True}, "use_long_context is not supported"),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks is 0, but must be at least 1"),
    ],
)
def test_configs_that_are_not_supported_are_refused(
    folder_of: FolderOf, case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(model_of(case), folder_of(case), changes, message, tmp_path)

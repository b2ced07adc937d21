"""Relatives of Llama whose attention, norms or experts differ: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.errors import UnsupportedModel
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
from tests.support.models import LLAMA_RELATIVES, make_model, save_model
from tests.support.variants import covering, slow_but

LONG = 140  # tokens of a prompt: several steps, and several windows
# Windows with ropes of their own; experts that are selected with a bias; norms behind the rope; a learned activation.
# Attention within chunks, and experts whose inputs are weighed.
# Selected tokens, which layers share.
KINDS = ("olmo3", "ernie4_5_moe", "hunyuan_v1_dense", "apertus", "llama4", "glm_moe_dsa")
FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    return make_model(case, **({} if "num_hidden_layers" in LLAMA_RELATIVES[case][1] else {"num_hidden_layers": 2}))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda case: save_model(model_of(case), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        [(case, device) for case in LLAMA_RELATIVES for device in ("cpu", "reference")],
        *((case, "cpu") for case in LLAMA_RELATIVES),
        *((case, "reference") for case in ("olmo3", "ernie4_5_moe", "llama4", "glm_moe_dsa")),
    ),
)
def test_engine_equals_transformers(folder_of: FolderOf, case: str, device: Any) -> None:
    """Greedy tokens and their log-probabilities, behind a short prompt and one that takes several steps."""
    check_log_probabilities(model_of(case), folder_of(case), device, prompts=(5, LONG), tokens=12)


@pytest.mark.parametrize(("case", "schedule"), covering(KINDS, SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    check_schedule(folder_of(case), Engine(folder_of(case), **schedule))


@pytest.mark.parametrize(
    ("case", "blocks"), slow_but([("glm_moe_dsa", 27), ("hunyuan_v1_dense", 27), ("llama4", 56)], ("llama4", 56))
)
def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf, case: str, blocks: int) -> None:
    """With few blocks."""
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder_of(case), model=model, block_size=4)
    size = blocks * roomy.info.cache_bytes // roomy.info.num_blocks
    engine = Engine(folder_of(case), model=model, block_size=4, kv_cache_memory_bytes=size, max_num_batched_tokens=16)
    check_schedule(folder_of(case), engine)
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    slow_but(
        [
            ("ernie4_5_moe", {"tensor_parallel_size": 2}),
            ("apertus", {"tensor_parallel_size": 2}),
            ("hunyuan_v1_moe", {"tensor_parallel_size": 2}),
            ("llama4", {"tensor_parallel_size": 2}),
            ("llama4", {"pipeline_parallel_size": 3}),
            ("glm_moe_dsa", {"tensor_parallel_size": 2}),
            ("deepseek_v32", {"pipeline_parallel_size": 2}),
            ("olmo3", {"pipeline_parallel_size": 2}),
        ],
        ("llama4", {"tensor_parallel_size": 2}),
        ("glm_moe_dsa", {"tensor_parallel_size": 2}),
    ),
)
def test_tokens_do_not_depend_on_the_ranks(folder_of: FolderOf, case: str, parallel: dict[str, int]) -> None:
    check_ranks(folder_of(case), parallel)


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    check_bits(folder_of(case), quantization, requests=3, tokens=8)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is not supported"),
        ("dots1", {"layer_types": ["full_attention", "chunked_attention"]}, "type 'chunked_attention' are not"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, "type 'sliding_attention' are not supported"),
        ("llama4", {"attention_chunk_size": None}, "need attention_chunk_size"),
        ("llama4", {"attention_chunk_size": 0}, "is 0, but must be at least 1"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "shares the tokens that an earlier one"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}, "supported is indexed_attention"),
    ],
)
def test_configs_that_are_not_supported_are_refused(
    folder_of: FolderOf, case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(model_of(case), folder_of(case), changes, message, tmp_path)


def test_chunks_begin_with_a_block(folder_of: FolderOf) -> None:
    with pytest.raises(UnsupportedModel, match="chunks of 32 tokens needs a --block-size that divides 32, not 12"):
        Engine(folder_of("llama4"), block_size=12)
    engine = Engine(folder_of("llama4"), model=ModelOptions(max_model_len=30), block_size=12)  # within the first chunk
    assert len(engine.generate(random_prompt(1, 20), greedy(4)).tokens) == 4


def test_a_stage_has_the_layer_that_selects_its_tokens(folder_of: FolderOf) -> None:
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel-size 2 is not supported for this model"):
        Engine(folder_of("glm_moe_dsa"), parallel=ParallelOptions(pipeline_parallel_size=2))


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_all_tokens_are_selected_in_short_contexts(folder_of: FolderOf, cache_dtype: Any) -> None:
    """The compiled kernels then compute what they compute in contexts that may become longer."""
    prompt, logprobs = random_prompt(3, 12), []
    for context in (24, 100):
        model = ModelOptions(max_model_len=context, dtype="bfloat16")
        engine = Engine(folder_of("deepseek_v32"), model=model, kv_cache_dtype=cache_dtype)
        logprobs.append([output.logprobs for output in engine.generate(prompt, greedy(8, logprobs=3)).outputs])
    assert logprobs[0] == logprobs[1]

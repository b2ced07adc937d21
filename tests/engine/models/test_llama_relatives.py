"""Relatives of Llama whose attention, norms or experts differ: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.models import LLAMA_RELATIVES, make_model, save_model
from tests.support.variants import covering, slow_but

SEED = 1
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


@cache
def alone(folder: Path) -> list[list[int]]:
    engine = Engine(folder, enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in workload(SEED)]


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
    engine = Engine(folder_of(case), model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    for seed, length in ((1, 5), (2, LONG)):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(12, logprobs=20))
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


@pytest.mark.parametrize(
    ("case", "blocks"), slow_but([("glm_moe_dsa", 27), ("hunyuan_v1_dense", 27), ("llama4", 56)], ("llama4", 56))
)
def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf, case: str, blocks: int) -> None:
    """With few blocks."""
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder_of(case), model=model, block_size=4)
    size = blocks * roomy.info.cache_bytes // roomy.info.num_blocks
    engine = Engine(folder_of(case), model=model, block_size=4, kv_cache_memory_bytes=size, max_num_batched_tokens=16)
    assert together(engine, workload(SEED), SEED) == alone(folder_of(case))
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
    engine = Engine(folder_of(case), parallel=ParallelOptions(**parallel))
    try:
        assert together(engine, workload(SEED), SEED) == alone(folder_of(case))
    finally:
        engine.core.close()


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(KINDS, ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    make = partial(Engine, folder_of(case), model=ModelOptions(dtype="bfloat16", quantization=quantization))
    requests = [(random_prompt(seed, 5 + 17 * seed), greedy(8, logprobs=3)) for seed in range(3)]
    batch, single = make(max_num_batched_tokens=16), make()
    for index, request in enumerate(requests):
        batch.add(f"r{index}", *request)
    batch.run()
    for index, request in enumerate(requests):
        outputs = zip(batch.results[f"r{index}"].outputs, single.generate(*request).outputs, strict=True)
        assert all(beside_others.logprobs == by_itself.logprobs for beside_others, by_itself in outputs)


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
    config = type(model_of(case).config).from_pretrained(folder_of(case))
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, model_impl="quire")


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

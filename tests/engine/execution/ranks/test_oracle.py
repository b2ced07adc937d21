"""Models that two ranks run give the tokens of transformers, as one rank does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import TokenProbs
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.oracle import generated
from tests.support.packed_checkpoints import SCALINGS, pack_fp8, save_gpt_oss
from tests.support.parallel import EP, PP, TP, running

TOKENS = 10
CASES = [
    pytest.param("llama", {"vocab_size": 301}, TP, marks=pytest.mark.slow),  # as the next, untied
    ("llama-biased-tied", {"vocab_size": 301}, TP),
    ("llama", {}, {"tensor_parallel_size": 4}),  # two KV heads
    ("qwen3", {"tie_word_embeddings": True}, TP),
    ("phi3", {}, TP),  # fused projections
    ("gemma2", {}, TP),
    pytest.param("gemma3", {}, PP, marks=pytest.mark.slow),  # stages: in phi3-longrope
    ("qwen3_moe", {}, EP),
    ("gpt_oss", {}, EP),
    ("deepseek_v3", {}, EP),
    pytest.param("deepseek_v3", {}, PP, marks=pytest.mark.slow),  # and in test_pipeline.py and test_invariance.py
    ("gpt2", {}, TP),  # positions, transposed weights
    ("bloom", {}, TP),  # ALiBi, interleaved projections
    ("falcon", {}, TP),  # one key head
    ("phi3-longrope", {}, PP),
    pytest.param("llama-biased-tied", {}, {**TP, **PP}, marks=pytest.mark.slow),  # both: in test_pipeline.py
    pytest.param("qwen2_moe", {}, EP, marks=pytest.mark.slow),
    *(
        pytest.param(case, {}, TP, marks=pytest.mark.slow)
        for case in (
            "cohere",
            "granitemoe",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "gpt_oss",
            "deepseek_v2",
            "deepseek_v3",
        )
    ),
]


@cache
def references(case: str, changes: tuple[tuple[str, Any], ...]) -> list[tuple[list[int], list[int], torch.Tensor]]:
    model = make_model(case, **dict(changes))
    return [(prompt, *generated(model, prompt, TOKENS)) for prompt in (random_prompt(1, 5), random_prompt(2, 40))]


@pytest.mark.parametrize(("case", "changes", "parallel"), CASES, ids=str)
def test_ranks_give_the_tokens_of_transformers(
    case: str, changes: dict[str, Any], parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts in chunks, then again: the second time from the prefix cache."""
    folder = save_model(make_model(case, **changes), tmp_path)
    with running(folder, parallel, block_size=8, max_num_batched_tokens=30) as engine:
        for prompt, tokens, logits in references(case, tuple(changes.items())) * 2:
            result = engine.generate(prompt, greedy(TOKENS, logprobs=5))
            assert result.tokens == tokens
            expected = logits.log_softmax(-1)
            for step, output in enumerate(result.outputs):
                assert output.logprobs is not None
                entry = output.logprobs[0]
                error = (torch.tensor(entry.logprobs) - expected[step][entry.token_ids]).abs().max()
                assert error / logits[step].abs().max() < 1e-4


def test_the_reference_device_runs_on_ranks(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3_moe"), tmp_path)
    (prompt, tokens, _), _ = references("qwen3_moe", ())
    with running(folder, TP, model=ModelOptions(device="reference")) as engine:
        assert engine.generate(prompt, greedy(TOKENS)).tokens == tokens


@pytest.mark.parametrize("parallel", [TP, PP, {**TP, **PP}], ids=str)
def test_values_at_the_positions_of_a_prompt(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Their logits are computed in other steps of the ranks than those of sampled tokens."""
    folder = save_model(make_model("gemma2"), tmp_path)
    prompt = random_prompt(3, 45)
    params = greedy(3, prompt_logprobs=2, logprobs=1, token_probs=TokenProbs(4, (7, 9)))
    single = Engine(folder, max_num_batched_tokens=17).generate(prompt, params)
    with running(folder, parallel, max_num_batched_tokens=17) as engine:
        several = engine.generate(prompt, params)
    assert several.tokens == single.tokens
    assert several.outputs[0].token_probs == pytest.approx(single.outputs[0].token_probs, rel=1e-3)
    entries = zip(several.outputs[0].prompt_logprobs or (), single.outputs[0].prompt_logprobs or (), strict=True)
    pairs = [(entry, reference) for entry, reference in entries if entry is not None and reference is not None]
    assert len(pairs) == 44
    for entry, reference in pairs:
        assert entry.token_ids == reference.token_ids
        assert entry.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


@pytest.mark.parametrize("scaling", ["blocks of 48 x 32", "a scale for each row"])
def test_packed_weights_are_cut(tmp_path: Path, scaling: str) -> None:
    folder = save_model(make_model("deepseek_v3"), tmp_path)
    pack_fp8(folder, SCALINGS[scaling])
    prompt = random_prompt(1, 12)
    expected = Engine(folder).generate(prompt, greedy(TOKENS)).tokens
    for parallel in (TP, EP):
        with running(folder, parallel) as engine:
            assert engine.generate(prompt, greedy(TOKENS)).tokens == expected


@pytest.mark.parametrize(("size", "parallel"), [(64, TP), (96, TP), (64, EP), (64, PP)], ids=str)
def test_experts_in_mxfp4_are_cut_anywhere(tmp_path: Path, size: int, parallel: dict[str, Any]) -> None:
    """Half of 96 is not a multiple of the 32 codes that share a scale."""
    plain, folder = save_gpt_oss(tmp_path, size)
    prompt = random_prompt(1, 12)
    with running(folder, parallel) as engine:
        assert engine.generate(prompt, greedy(TOKENS)).tokens == Engine(plain).generate(prompt, greedy(TOKENS)).tokens


@pytest.mark.parametrize("fields", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_quantized_weights_and_caches_are_close(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Each rank quantizes its own rows and columns."""
    folder = save_model(make_model("qwen3", intermediate_size=256, hidden_size=128), tmp_path)
    prompt = random_prompt(4, 40)
    options: dict[str, Any] = {"model": ModelOptions(**fields), "kv_cache_dtype": "int8"}
    logprobs = []
    for parallel in ({}, TP):
        with running(folder, parallel, **options) as engine:
            reported = engine.generate(prompt, greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs or ()
            logprobs.append(torch.tensor([entry.logprobs[0] for entry in reported if entry]))
    assert len(logprobs[0]) == 39
    assert (logprobs[0] - logprobs[1]).abs().median() < 0.3  # unrelated log-probabilities differ by 3


def test_steps_are_not_captured(tmp_path: Path) -> None:
    """The sums of ranks are no kernel calls, which a step graph could replay."""
    folder = save_model(make_model("llama"), tmp_path)
    with running(folder, TP) as engine:
        engine.generate(random_prompt(1, 5), greedy(10))
        assert engine.runner.steps.not_capturable
        assert not engine.runner.steps.graphs


@pytest.mark.parametrize(
    ("case", "options", "complaint"),
    [
        (
            "llama",
            {},
            "4 attention heads cannot be divided among 3 ranks: .* must be one of 1, 2, 4",
        ),
        ("diffllama", {}, "must be 1 for .*, diffllama: they divide"),
        ("llama", {"task": "embed"}, "must be 1 for models for embeddings"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    tmp_path: Path, case: str, options: dict[str, Any], complaint: str
) -> None:
    folder = save_model(make_model(case), tmp_path)
    with (
        pytest.raises(UnsupportedModel, match=complaint),
        running(folder, {"tensor_parallel_size": 3}, model=ModelOptions(**options)),
    ):
        pass

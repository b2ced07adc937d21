"""Sampler: the effect of each sampling parameter on tokens."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import token_mask
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.sampler import Sampler, sample_tokens
from quire.engine.scheduling.plan import NOT_FINITE, NewSequence, StepPlan
from quire.kernels.sampling_state import uniform

VOCAB = 50


class SamplerHarness:
    """A sampler and a request table with some requests."""

    def __init__(self, *requests: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), vocab: int = VOCAB) -> None:
        self.table = RequestTable(8, 64, 4)
        self.sampler = Sampler(self.table, vocab)
        plan = StepPlan(
            new=[
                NewSequence(f"r{i}", np.array(prompt, np.int32), len(prompt), params, None)
                for i, params in enumerate(requests)
            ]
        )
        self.sampler.update(*self.table.apply(plan)[:2])
        self.rows = [self.table.row_of(f"r{i}") for i in range(len(requests))]

    def sample(self, logits: torch.Tensor) -> list[int]:
        rows = logits.float().expand(len(self.rows), -1).clone()
        return [sampled.token for sampled in self.sampler.sample(rows, self.rows)]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **fields})


def logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_counts(count: int, target: torch.Tensor, **fields: Any) -> Counter[int]:
    """Count the tokens that `count` independent requests sample from the same logits."""
    rows = target.float().expand(count, -1).clone()
    row = params(temperature=1.0, **fields) if "temperature" not in fields else params(**fields)
    return Counter(sample_tokens(rows, [row] * count, [uniform(seed, 0) for seed in range(count)]))


def test_greedy_returns_the_argmax() -> None:
    assert SamplerHarness(params()).sample(logits()) == [logits().argmax().item()]


def test_frequencies_follow_the_probabilities() -> None:
    target = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = sample_counts(20_000, target)
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 20_000 == pytest.approx(share, abs=0.015)


def test_temperature_scales_the_logits() -> None:
    target = torch.tensor([0.6, 0.4]).log()
    hot, cold = sample_counts(5000, target, temperature=2.0), sample_counts(5000, target, temperature=0.3)
    share = 1 / (1 + (0.4 / 0.6) ** 0.5)
    assert hot[0] / 5000 == pytest.approx(share, abs=0.03)
    assert cold[0] / 5000 == pytest.approx(1 / (1 + (0.4 / 0.6) ** (1 / 0.3)), abs=0.03)


def test_top_k_keeps_the_k_top_tokens() -> None:
    assert set(sample_counts(3000, logits() / 10, top_k=3)) == set(logits().topk(3).indices.tolist())


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_top_p_keeps_the_smallest_set_that_covers_p(vocab: int) -> None:
    # The larger one is nearly uniform: it needs more top tokens than are tried first.
    target = logits(vocab=vocab) / (1 if vocab == VOCAB else 100)
    probs, ids = target.softmax(-1).sort(descending=True)
    nucleus = int((probs.cumsum(-1) < 0.7).sum()) + 1
    counts = sample_counts(4000, target, top_p=0.7)
    assert set(counts) <= set(ids[:nucleus].tolist())
    assert len(counts) > 0.3 * min(nucleus, 3000)
    if vocab == VOCAB:
        assert set(counts) == set(ids[:nucleus].tolist())


def test_top_p_applies_after_top_k() -> None:
    target = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Renormalized, the first three are 0.444, 0.333 and 0.222; the first two cover 0.7.
    assert set(sample_counts(2000, target, top_k=3, top_p=0.7)) == {0, 1}


def test_min_p_drops_tokens_below_a_fraction_of_the_top_probability() -> None:
    target = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    assert set(sample_counts(3000, target, min_p=0.2)) == {0, 1, 2}


def test_a_tiny_top_p_is_greedy() -> None:
    assert set(sample_counts(200, logits(), top_p=1e-9)) == {logits().argmax().item()}


def test_a_top_p_that_underflows_float32_is_greedy() -> None:
    assert set(sample_counts(200, logits(), top_p=1e-60)) == {logits().argmax().item()}


def test_a_large_top_k_is_kept_in_a_batch_with_top_p() -> None:
    flat = logits(vocab=5000) / 100
    rows = [params(temperature=1.0, top_k=2000)] * 50
    randoms = [uniform(seed, 0) for seed in range(50)]
    alone = sample_tokens(flat.expand(50, -1).clone(), rows, randoms)
    batch = [*rows, params(temperature=1.0, top_p=0.01)]
    assert sample_tokens(flat.expand(51, -1).clone(), batch, [*randoms, 0.5])[:50] == alone
    assert len(set(alone) - set(flat.topk(256).indices.tolist())) > 20


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.3}, {"top_k": 50}, {"top_k": 200, "top_p": 0.9}, {"min_p": 0.5, "top_k": 9}]
)
def test_tokens_with_equal_logits_do_not_depend_on_the_batch(fields: dict[str, Any]) -> None:
    """Models in bfloat16 return equal logits for many tokens."""
    rounded = logits(vocab=8000).bfloat16().float().expand(60, -1)
    flat = logits(seed=1, vocab=8000)[None] / 100
    rows = [params(temperature=1.0, **fields)] * 60
    randoms = [uniform(seed, 0) for seed in range(60)]
    alone = sample_tokens(rounded.clone(), rows, randoms)
    for other in ({"top_p": 0.1}, {"top_p": 0.9}, {"top_k": 3000}):
        batch = [*rows, params(temperature=1.0, **other)]
        assert sample_tokens(torch.cat((rounded, flat)), batch, [*randoms, 0.5])[:60] == alone


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 1 << 62))
@settings(deadline=None)
def test_a_seeded_token_does_not_depend_on_the_batch(kinds: list[int], seed: int) -> None:
    row = params(temperature=1.0, seed=seed, top_p=0.95)
    others = [
        (params(), params(temperature=1.0, seed=1), params(temperature=2.0, top_k=3), params(temperature=1, min_p=0.1))[
            k
        ]
        for k in kinds
    ]
    alone = SamplerHarness(row).sample(logits())[0]
    assert SamplerHarness(row, *others).sample(logits())[0] == alone
    assert SamplerHarness(*others, row).sample(logits())[-1] == alone


def test_random_numbers_are_uniform() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    for low in range(10):
        assert sum(low / 10 <= number < (low + 1) / 10 for number in numbers) / 10_000 == pytest.approx(0.1, abs=0.02)


def test_only_allowed_tokens_are_sampled() -> None:
    allowed = logits().topk(10, largest=False).indices.tolist()
    token = SamplerHarness(params(allowed_tokens=token_mask(np.array(allowed, np.int32), VOCAB))).sample(logits())[0]
    assert token == max(allowed, key=lambda token: logits()[token].item())


def test_logit_bias_shifts_a_token() -> None:
    worst, best = int(logits().argmin()), int(logits().argmax())
    assert SamplerHarness(params(logit_bias={worst: 100.0})).sample(logits()) == [worst]
    assert SamplerHarness(params(logit_bias={best: -100.0})).sample(logits()) == [int(logits().topk(2).indices[1])]


def test_bad_words_are_never_completed() -> None:
    harness = SamplerHarness(params(bad_words=((7, 8), (9,))))
    row = torch.zeros(VOCAB)
    row[9], row[7] = 3.0, 2.0
    assert harness.sample(row) == [7]  # 9 alone is a bad word
    row[9] = 0.0
    row[8] = 5.0
    assert harness.sample(row) == [7]  # 8 would complete the other bad word
    row[7] = 0.0
    assert harness.sample(row) != [8]
    row[5] = 9.0
    assert harness.sample(row) == [5]
    row[5] = 0.0
    assert harness.sample(row) == [8]  # not after a 7


def test_min_tokens_masks_stop_tokens() -> None:
    harness = SamplerHarness(params(min_tokens=2, eos_token_ids=(4,), stop_token_ids=frozenset({5})))
    row = torch.zeros(VOCAB)
    row[4], row[5], row[6] = 9.0, 8.0, 7.0
    assert [harness.sample(row)[0] for _ in range(3)] == [6, 6, 4]


def test_no_bias_makes_an_end_possible_before_min_tokens() -> None:
    biases = {4: 100.0, 5: 90.0, 6: 80.0}
    harness = SamplerHarness(
        params(min_tokens=2, eos_token_ids=(4,), begin_suppress_tokens=(5,), logit_bias=biases, frequency_penalty=1.0)
    )
    assert [harness.sample(torch.zeros(VOCAB))[0] for _ in range(3)] == [6, 5, 4]


def test_penalties_count_prompt_and_output_tokens() -> None:
    flat = torch.full((VOCAB,), -1.0)
    flat[[10, 11, 1]] = torch.tensor([2.0, 1.9, 1.95])
    # The prompt contains token 1: only the repetition penalty counts it.
    assert [SamplerHarness(params(presence_penalty=0.5)).sample(flat)[0]] == [10]
    repetition = SamplerHarness(params(repetition_penalty=1.5))
    assert [repetition.sample(flat)[0] for _ in range(3)] == [10, 11, 10]  # 2 / 1.5 > 1.95 / 1.5 > 1.9 / 1.5
    presence = SamplerHarness(params(presence_penalty=0.2))
    assert [presence.sample(flat)[0] for _ in range(4)] == [10, 1, 11, 10]
    frequency = SamplerHarness(params(frequency_penalty=0.2))
    assert [frequency.sample(flat)[0] for _ in range(5)] == [10, 1, 11, 10, 1]


def test_repetition_penalty_lowers_negative_logits() -> None:
    target = torch.full((VOCAB,), -9.0)
    target[1], target[10] = -1.0, -1.5
    assert SamplerHarness(params(repetition_penalty=2.0)).sample(target) == [10]


def test_penalties_are_rebuilt_after_preemption() -> None:
    """A resumed sequence enters the table with its output tokens."""
    table = RequestTable(2, 64, 4)
    sampler = Sampler(table, VOCAB)
    resumed = NewSequence("r", np.array([1, 2, 3, 10, 10], np.int32), 3, params(frequency_penalty=1.0), None)
    sampler.update(*table.apply(StepPlan(new=[resumed]))[:2])
    target = torch.zeros(1, VOCAB)
    target[0, 10], target[0, 11] = 3.0, 1.5
    assert sampler.sample(target, [table.row_of("r")])[0].token == 11


def test_logprobs_are_those_of_the_raw_logits() -> None:
    target = params(logprobs=3, temperature=0.5, logit_bias={int(logits().argmin()): 100.0})
    harness = SamplerHarness(target, params())
    rows = logits().expand(2, -1).clone()
    first, second = harness.sampler.sample(rows, harness.rows)
    assert second.logprobs is None
    assert first.logprobs is not None
    raw = logits().log_softmax(-1)
    assert first.logprobs.token_ids == [int(raw.argmin()), *raw.topk(3).indices.tolist()]
    assert first.logprobs.ranks == [VOCAB, 1, 2, 3]
    for token, value in zip(first.logprobs.token_ids, first.logprobs.logprobs, strict=True):
        assert math.isclose(value, raw[token].item(), abs_tol=1e-5)


def test_listed_tokens_are_reported_in_place_of_the_top_tokens() -> None:
    harness = SamplerHarness(params(logprobs=0, logprob_token_ids=(5, 0, 9)), params(logprobs=2), params(logprobs=0))
    rows = logits().expand(3, -1).clone()
    listed, top, alone = (sampled.logprobs for sampled in harness.sampler.sample(rows, harness.rows))
    raw = logits().log_softmax(-1)
    best = int(raw.argmax())
    assert listed is not None
    assert top is not None
    assert alone is not None
    assert listed.token_ids == [best, 5, 0, 9]
    assert listed.ranks == [1, 0, 0, 0]
    for token, value in zip(listed.token_ids, listed.logprobs, strict=True):
        assert math.isclose(value, raw[token].item(), abs_tol=1e-5)
    assert top.token_ids == [best, *raw.topk(2).indices.tolist()]
    assert alone.token_ids == [best]


def test_nan_logits_do_not_affect_other_rows() -> None:
    harness = SamplerHarness(params(temperature=1.0), params(temperature=1.0, top_p=0.5), params())
    rows = logits().expand(3, -1).clone()
    rows[0], rows[1] = math.nan, math.nan
    sampled = harness.sampler.sample(rows, harness.rows)
    assert [sample.error for sample in sampled] == [NOT_FINITE, NOT_FINITE, None]
    assert sampled[2].token == logits().argmax().item()


def test_bad_words_with_the_same_last_tokens_but_one() -> None:
    harness = SamplerHarness(params(bad_words=((7, 8), (6, 7, 9), (5, 5, 5, 7, 4))))
    row = torch.zeros(VOCAB)
    row[6] = 1.0
    assert harness.sample(row) == [6]
    row[7] = 2.0
    assert harness.sample(row) == [7]
    row[8], row[9], row[4] = 5.0, 4.0, 3.0
    assert harness.sample(row) == [4]  # 7 8 and 6 7 9 are bad words, 6 7 4 is not

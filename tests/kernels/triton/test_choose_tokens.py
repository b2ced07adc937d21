"""The kernels that choose tokens against their reference and against the CPU's choice."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.sampling.sampler import sample_tokens
from quire.kernels.choose_tokens import argmax, choose_tokens
from quire.kernels.sampling import NO_TOKEN, ChoiceSettings, choose_tokens_reference
from quire.kernels.sampling_state import uniform
from tests.support.variants import covering

NEAR = 1e-5  # probability within which rounding may decide between two tokens


def params(**fields: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **fields})  # type: ignore[arg-type]


def settings_of(requests: list[SamplingParams], randoms: list[float], device: torch.device) -> ChoiceSettings:
    def tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    ranked = [bool(request.temperature and (request.top_k or request.top_p < 1)) for request in requests]
    return ChoiceSettings(
        tensor([request.temperature for request in requests], torch.float32),
        tensor(randoms, torch.float64),
        tensor([math.log(request.min_p) if request.min_p else -math.inf for request in requests], torch.float32),
        tensor([request.top_k for request in requests], torch.int32),
        tensor([request.top_p for request in requests], torch.float32),
        any(request.temperature > 0 and not is_ranked for request, is_ranked in zip(requests, ranked, strict=True)),
        any(ranked),
    )


def assert_chosen(logits: torch.Tensor, requests: list[SamplingParams], randoms: list[float]) -> None:
    """The tokens are the CPU's, or those of a random number that hardly differs."""
    tokens = choose_tokens(logits, settings_of(requests, randoms, logits.device)).tolist()
    on_host = logits.cpu().contiguous()
    expected = sample_tokens(on_host.clone(), requests, randoms)
    for row, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:
            near = [
                sample_tokens(on_host[row : row + 1].clone(), [requests[row]], [min(max(moved, 0.0), 1 - 2**-53)])[0]
                for moved in (randoms[row] - NEAR, randoms[row] + NEAR)
            ]
            assert token in near, (requests[row], randoms[row], token, other)


KINDS = [
    params(temperature=0.0),
    params(temperature=1.0),
    params(temperature=0.3),
    params(temperature=1.7, min_p=0.05),
    params(temperature=1.0, top_k=1),
    params(temperature=0.8, top_k=7),
    params(temperature=1.0, top_p=0.9),
    params(temperature=1.2, top_p=0.5, top_k=20),
    params(temperature=1.0, top_p=0.95, min_p=0.02),
    params(temperature=0.01, top_p=0.99),
    params(temperature=1.0, top_p=0.0),
    params(temperature=1.0, top_k=100_000),
]


@pytest.mark.parametrize("vocab", [1, 5, 50, 4096, 9001])
def test_tokens_are_those_of_the_cpu(device: torch.device, vocab: int) -> None:
    """In a mixed batch, with columns of NaN beside the logits."""
    memory = torch.full((len(KINDS), vocab + 7), math.nan, device=device)
    memory[:, :vocab] = torch.randn(len(KINDS), vocab, device=device) * 3
    memory[:, : vocab // 20] += 6
    logits = memory[:, :vocab]
    assert_chosen(logits, KINDS, [uniform(seed, vocab) for seed in range(len(KINDS))])
    assert bool(memory[:, vocab:].isnan().all())


@pytest.mark.parametrize("vocab", [300, 5000])
def test_many_random_numbers(device: torch.device, vocab: int) -> None:
    kinds = [params(temperature=1.0), params(temperature=0.7, min_p=0.1), params(temperature=1.0, top_p=0.8, top_k=40)]
    count = 60 if vocab == 300 else 12
    requests = [kind for kind in kinds for _ in range(count if kind.top_k == 0 else count // 4)]
    logits = (torch.randn(vocab, device=device) * 2.5).expand(len(requests), -1).contiguous()
    assert_chosen(logits, requests, [uniform(seed, 1) for seed in range(len(requests))])


@pytest.mark.parametrize("fields", [{"top_p": 0.3}, {"top_k": 50}, {"top_k": 70, "top_p": 0.9}])
def test_equal_logits_are_ordered_by_id(device: torch.device, fields: dict[str, float]) -> None:
    logits = torch.randn(6, 3000, device=device).mul_(2).round_()
    logits[0], logits[1] = 0.0, torch.where(logits[1] > 0, 0.0, -0.0)
    assert_chosen(logits, [params(temperature=1.0, **fields)] * 6, [uniform(seed, 2) for seed in range(6)])


def test_more_candidates_than_fit(device: torch.device) -> None:
    """Flat distributions, where the searches read whole rows."""
    logits = torch.randn(3, 6000, device=device) / 100
    requests = [params(temperature=1.0, top_p=0.9), params(temperature=1.0, top_k=5000), params(top_p=0.999)]
    assert_chosen(logits, requests, [0.4, 0.9999, 0.0])


@pytest.mark.parametrize("random", [0.0, 0.5, 1 - 2**-53])
def test_impossible_tokens_are_never_chosen(device: torch.device, random: float) -> None:
    logits = torch.full((6, 9000), -torch.inf, device=device)
    logits[0::3, 8191], logits[1::3, 0], logits[2::3, 4095:4097] = -50.0, 3.0, 1.0
    requests = [params()] * 3 + [params(top_p=0.99)] * 3
    last = 4095 if random < 0.5 else 4096
    tokens = choose_tokens(logits, settings_of(requests, [random] * 6, device)).tolist()
    assert tokens == [8191, 0, last] * 2


@pytest.mark.parametrize(("vocab", "invalid"), covering([40, 4500], [torch.nan, torch.inf]))
def test_rows_with_nan_or_infinity_have_no_token(vocab: int, invalid: float, device: torch.device) -> None:
    logits = torch.zeros(5, vocab, device=device)
    logits[0], logits[1, 0], logits[2, vocab - 1], logits[3] = invalid, invalid, invalid, -torch.inf
    for kind in KINDS:
        settings = settings_of([kind] * 5, [0.5] * 5, device)
        for tokens in (choose_tokens(logits, settings).tolist(), choose_tokens_reference(logits, settings).tolist()):
            assert tokens[:3] == [NO_TOKEN] * 3
            assert all(0 <= token < vocab for token in tokens[3:])
    assert argmax(logits).tolist() == [NO_TOKEN] * 3 + [0, 0]


def test_the_first_of_the_largest(device: torch.device) -> None:
    logits = torch.randn(3, 9000, device=device)
    logits[0, 7000:], logits[1, [4095, 4096]] = 9.0, 9.0
    settings = settings_of([params(temperature=0.0)] * 3, [0.0] * 3, device)
    assert choose_tokens(logits, settings).tolist() == [7000, 4095, int(logits[2].argmax())]
    assert choose_tokens(logits[:0], settings_of([], [], device)).tolist() == []


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    logits = torch.randn(len(KINDS), 4500, device=device).mul_(2).bfloat16().float()
    randoms = [uniform(seed, 3) for seed in range(len(KINDS))]
    together = choose_tokens(logits, settings_of(KINDS, randoms, device)).tolist()
    for row, kind in enumerate(KINDS):
        alone = settings_of([kind], [randoms[row]], device)
        assert choose_tokens(logits[row : row + 1], alone).tolist() == [together[row]]


def test_the_reference_follows_the_same_rule() -> None:
    logits, randoms = torch.randn(len(KINDS), 600) * 3, [uniform(seed, 4) for seed in range(len(KINDS))]
    settings = settings_of(KINDS, randoms, torch.device("cpu"))
    assert choose_tokens_reference(logits, settings).tolist() == sample_tokens(logits.clone(), KINDS, randoms)
    assert dataclasses.asdict(settings)["ranked"]

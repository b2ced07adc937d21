"""Kernels over logits against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.sampling import NO_TOKEN, Masks, apply_token_bitmask, argmax, mask_words, sample

both = pytest.mark.parametrize("compiled", [True, False])


def _run(compiled: bool, call: Callable[[], list[int] | None]) -> list[int] | None:
    if compiled:
        return call()
    with native.disabled():
        return call()


def _mask(allowed: torch.Tensor) -> Masks:
    bits = np.zeros((len(allowed), mask_words(allowed.shape[1]) * 32), bool)
    bits[:, : allowed.shape[1]] = allowed.numpy()
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@both
@pytest.mark.parametrize("vocab", [5, 32, 50, 1000, 4099])
def test_forbidden_tokens_get_minus_infinity(compiled: bool, vocab: int) -> None:
    logits, allowed = torch.randn(4, vocab), torch.rand(2, vocab) < 0.3
    allowed[:, vocab - 1] = True
    expected = logits.clone()
    expected[3] = expected[3].where(allowed[0], -torch.inf)
    expected[1] = expected[1].where(allowed[1], -torch.inf)
    _run(compiled, lambda: apply_token_bitmask(logits, _mask(allowed), [(3, 0), (1, 1)]))
    assert torch.equal(logits, expected)


@both
@pytest.mark.parametrize("at", [3, 40])
def test_the_mask_alone_decides_if_all_allowed_logits_are_minus_infinity(compiled: bool, at: int) -> None:
    logits, allowed = torch.randn(1, 41), torch.zeros(1, 41, dtype=torch.bool)
    allowed[0, at], logits[0, at] = True, -torch.inf
    _run(compiled, lambda: apply_token_bitmask(logits, _mask(allowed), [(0, 0)]))
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [at]


@both
@pytest.mark.parametrize("at", [3, 40])
@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_mask_keeps_nan(compiled: bool, at: int, is_allowed: bool) -> None:
    logits, allowed = torch.randn(1, 41), torch.zeros(1, 41, dtype=torch.bool)
    allowed[0, at], allowed[0, 5], logits[0, at] = is_allowed, True, torch.nan
    _run(compiled, lambda: apply_token_bitmask(logits, _mask(allowed), [(0, 0)]))
    assert logits[0].isnan().nonzero()[:, 0].tolist() == [at]
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [5]


@both
@pytest.mark.parametrize("vocab", [1, 15, 4096, 10_001])
def test_argmax_is_the_first_of_equals(compiled: bool, vocab: int) -> None:
    logits = torch.randn(4, vocab)
    logits[1, vocab // 2 :] = 9.0
    logits[2] = -torch.inf
    logits[3, vocab - 1] = 3e38
    expected = [int(logits[0].argmax()), vocab // 2, 0, vocab - 1]
    assert _run(compiled, lambda: argmax(logits)) == expected


@both
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("vocab", [5, 4096, 10_001])
def test_samples_follow_the_distribution(compiled: bool, vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, dtype=torch.float64) * 3
    sums = (logits / temperature).softmax(-1).cumsum(-1)
    randoms = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampled = _run(
        compiled, lambda: sample(logits.float().expand(400, -1).contiguous(), [temperature] * 400, randoms.tolist())
    )
    assert sampled is not None
    tokens = torch.tensor(sampled)
    upper, lower = sums[tokens], sums[tokens] - (logits / temperature).softmax(-1)[tokens]
    assert ((lower - 1e-5 <= randoms) & (randoms <= upper + 1e-5)).all()


@both
@pytest.mark.parametrize("random", [0.0, 0.5, 1 - 2**-53])
def test_impossible_tokens_are_never_sampled(compiled: bool, random: float) -> None:
    logits = torch.full((3, 9000), -torch.inf)
    logits[0, 8191], logits[1, 0], logits[2, 4095:4097] = -50.0, 3.0, 1.0
    sampled = _run(compiled, lambda: sample(logits, [1.0] * 3, [random] * 3))
    assert sampled == [8191, 0, 4095 if random < 0.5 else 4096]


@pytest.mark.parametrize("random", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.9, 0.0), (700, 0.999, 0.0), (0, 1.0, 0.1)])
@both
def test_tokens_that_are_dropped_are_never_sampled(
    compiled: bool, random: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.full((2, 9000), -torch.inf)
    logits[0, 8191], logits[1, 4095:4097], logits[1, 17] = -50.0, 1.0, -20.0

    def call() -> list[int]:
        return sample(logits, [1.0] * 2, [random] * 2, min_ps=[min_p] * 2, top_ks=[top_k] * 2, top_ps=[top_p] * 2)

    sampled = _run(compiled, call)
    assert sampled is not None
    # Token 17 is improbable; only a top-k of many keeps it, for the largest of random numbers.
    assert sampled == [8191, 4095 if random < 0.5 else 4096] or (top_k and random > 0.5 and sampled == [8191, 17])


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocab", [9, 300, 5001, 40_000])
def test_tokens_of_the_kernel_are_those_of_torch(vocab: int, spread: float) -> None:
    """Or those of a random number that hardly differs. Flat distributions keep more tokens than are tried first."""
    generator = torch.Generator().manual_seed(0)
    kinds = [(k, p, m) for k in (0, 1, 20, 300, 6000) for p in (0.0, 0.3, 0.95, 1.0) for m in (0.0, 0.05)]
    rows = torch.randn(len(kinds), vocab, generator=generator) * spread
    randoms = torch.rand(len(kinds), dtype=torch.float64, generator=generator).tolist()
    top_ks, top_ps, min_ps = (list(values) for values in zip(*kinds, strict=True))

    def run(randoms: list[float]) -> list[int]:
        return sample(rows, [0.8] * len(kinds), randoms, min_ps=min_ps, top_ks=top_ks, top_ps=top_ps)

    sampled = run(randoms)
    with native.disabled():
        expected = [
            run([min(max(random + moved, 0.0), 1 - 2**-53) for random in randoms]) for moved in (-1e-4, 0, 1e-4)
        ]
    ranks = rows.argsort(descending=True).argsort()
    for row, token in enumerate(sampled):
        places = ranks[row] if kinds[row][0] or kinds[row][1] < 1 else torch.arange(vocab)
        low, _, high = (int(places[tokens[row]]) for tokens in expected)
        assert low <= places[token] <= high, kinds[row]
    same = sum(token == other for token, other in zip(sampled, expected[1], strict=True))
    assert same >= len(kinds) - 3


@both
@pytest.mark.parametrize("invalid", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [5, 40, 9000])
def test_rows_with_nan_or_infinity_have_no_token(compiled: bool, vocab: int, invalid: float) -> None:
    """Wherever it is; the other rows do."""
    logits = torch.zeros(5, vocab)
    logits[0], logits[1, 0], logits[2, vocab // 2], logits[3, vocab - 1] = invalid, invalid, invalid, invalid
    assert _run(compiled, lambda: sample(logits, [1.0] * 5, [0.0] * 5)) == [NO_TOKEN] * 4 + [0]
    assert _run(compiled, lambda: argmax(logits)) == [NO_TOKEN] * 4 + [0]


def test_a_sample_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 5000)
    randoms = torch.rand(64).tolist()
    together = sample(logits, [1.0] * 64, randoms)
    assert [sample(logits[i : i + 1], [1.0], randoms[i : i + 1])[0] for i in range(64)] == together

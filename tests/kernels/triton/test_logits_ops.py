"""Kernels that mask, bias and penalize logits, and report log-probabilities, against their torch references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.kernels import adjust_logits, token_bitmask, token_logprobs
from quire.kernels.adjust_logits import IN_PROMPT, Biases, Penalties, TokenCounts

VOCABS = [5, 64, 4097, 9000]
vocabs = pytest.mark.parametrize("vocab", VOCABS)


def logits_of(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Rows of logits between columns of NaN."""
    memory = torch.full((rows, vocab + 9), math.nan, device=device)
    memory[:, 3 : vocab + 3] = torch.randn(rows, vocab, device=device) * 3
    return memory[:, 3 : vocab + 3]


def masks_of(allowed: torch.Tensor) -> torch.Tensor:
    words = -(-allowed.shape[1] // 32)
    bits = np.zeros((len(allowed), words * 32), bool)
    bits[:, : allowed.shape[1]] = allowed.cpu().numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(allowed.device)


@vocabs
def test_masks(device: torch.device, vocab: int) -> None:
    """Of some rows; a mask whose tokens are all impossible, and one with NaN."""
    logits, allowed = logits_of(6, vocab, device), torch.rand(4, vocab, device=device) < 0.4
    allowed[:, vocab - 1] = True
    logits[3] = logits[3].masked_fill(allowed[2], -torch.inf)
    logits[4, vocab - 1] = torch.nan
    rows = torch.tensor([1, -1, 0, 2, 3, 1], dtype=torch.int32, device=device)
    expected = logits.clone()
    token_bitmask.reference(expected, masks_of(allowed), rows)
    token_bitmask.mask_logits(logits, masks_of(allowed), rows)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    assert logits[3].isfinite().equal(allowed[2])
    assert logits[4].isnan().nonzero()[:, 0].tolist() == [vocab - 1]


def test_masks_are_those_of_the_cpu(device: torch.device) -> None:
    from quire.kernels.sampling import apply_token_bitmask

    logits, allowed = logits_of(3, 100, device), torch.rand(2, 100, device=device) < 0.5
    on_host = logits.cpu().contiguous()
    apply_token_bitmask(on_host, masks_of(allowed).cpu().numpy().view(np.uint32), [(0, 1), (2, 0)])
    token_bitmask.mask_logits(logits, masks_of(allowed), torch.tensor([1, -1, 0], dtype=torch.int32, device=device))
    assert torch.equal(logits.cpu(), on_host)


@vocabs
def test_biases(device: torch.device, vocab: int) -> None:
    """Up to more than are added at a time; some end at a position, and one token has two."""
    width = 300
    tokens = torch.stack([torch.randperm(max(vocab, width), device=device)[:width] % vocab for _ in range(4)]).int()
    values = torch.randn(4, width, device=device)
    counts = torch.tensor([0, min(vocab, 1), min(vocab, 130), min(vocab, width)], dtype=torch.int32, device=device)
    limits = torch.randint(0, 12, (4, width), dtype=torch.int32, device=device)
    if vocab > width:
        tokens[3, 0] = tokens[3, 1]
        values[3, 0], limits[3, :2] = -math.inf, 100
    else:
        tokens = torch.arange(width, dtype=torch.int32, device=device).expand(4, -1).contiguous() % vocab
    rows = torch.tensor([3, 0, 2, 1, 3], device=device)
    positions = torch.tensor([0, 3, 5, 9, 20], device=device)
    logits, biases = logits_of(5, vocab, device), Biases(tokens, values, limits, counts)
    expected = logits.clone()
    adjust_logits.add_biases_reference(expected, rows, positions, biases)
    adjust_logits.add_biases(logits, rows, positions, biases)
    torch.testing.assert_close(logits, expected)


@vocabs
def test_penalties(device: torch.device, vocab: int) -> None:
    """Rows without a slot do not change; rows of drafts count the draft in front of them."""
    rows = torch.tensor([2, 0, 1, 1, 1, 1], device=device)
    depths = torch.tensor([0, 0, 0, 1, 2, 3], dtype=torch.int32, device=device)
    inputs = torch.tensor([1 << 40, 1 << 40, 1 << 40, 3, 3, vocab - 1], device=device)
    counts = torch.randint(0, 3, (2, vocab), dtype=torch.int32, device=device)
    counts += IN_PROMPT * torch.randint(0, 2, (2, vocab), dtype=torch.int32, device=device)
    seen = TokenCounts(torch.tensor([-1, 1, 0], dtype=torch.int32, device=device), counts)
    penalties = Penalties(*(torch.rand(3, device=device) + shift for shift in (0.7, -0.5, -0.5)))
    logits, before = logits_of(6, vocab, device), counts.clone()
    expected = logits.clone()
    adjust_logits.penalize_reference(expected, rows, depths, inputs % vocab, seen, penalties)
    untouched = logits[1].clone()
    adjust_logits.penalize(logits, rows, depths, inputs, seen, penalties)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits[1], untouched)
    assert torch.equal(counts, before)
    assert not torch.equal(expected[2], expected[3])


@vocabs
@pytest.mark.parametrize("top", [0, 1, 5, 100_000])
def test_logprobs(device: torch.device, vocab: int, top: int) -> None:
    logits = logits_of(4, vocab, device)
    logits[1] = logits[1].round()
    logits[2, : vocab // 2] = -torch.inf
    logits[3] *= 30
    tokens = torch.tensor([0, vocab // 2, 0, vocab - 1], device=device)
    actual = token_logprobs.token_logprobs(logits, tokens, top)
    expected = token_logprobs.reference(logits, tokens, min(top, vocab))
    for value, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=1e-6)


def test_logprobs_are_those_of_the_cpu(device: torch.device) -> None:
    from quire.engine.execution.sampling.logprobs import top_logprobs

    logits, tokens = logits_of(3, 500, device), [4, 499, 0]
    actual = token_logprobs.token_logprobs(logits, torch.tensor(tokens, device=device), 7)
    for row, expected in enumerate(top_logprobs(logits.cpu(), tokens, 7)):
        assert expected.token_ids == [tokens[row], *actual.top_ids[row].tolist()]
        assert expected.ranks == [int(actual.ranks[row]), *range(1, 8)]
        assert expected.logprobs == pytest.approx([float(actual.chosen[row]), *actual.top[row].tolist()], abs=1e-5)


def test_empty_batches(device: torch.device) -> None:
    none, rows = torch.empty(0, 50, device=device), torch.empty(0, dtype=torch.int64, device=device)
    assert token_logprobs.token_logprobs(none, rows, 3).top.shape == (0, 3)
    token_bitmask.mask_logits(none, torch.zeros(1, 2, dtype=torch.int32, device=device), rows.int())

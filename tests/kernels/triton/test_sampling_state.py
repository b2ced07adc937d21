"""Random numbers, and verified drafts of all sequences at once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import gpu
from quire.kernels.adjust_logits import TokenCounts
from quire.kernels.sampling import NO_TOKEN
from quire.kernels.sampling_state import (
    random_state,
    randoms_at,
    randoms_reference,
    record_reference,
    record_tokens,
    uniform,
)

SEEDS = [0, 1, -1, 7, 1 << 62, (1 << 64) - 1, -(1 << 63), 123456789]


def test_random_numbers_are_those_of_the_cpu(device: torch.device) -> None:
    states = torch.tensor([random_state(seed) for seed in SEEDS], device=device)
    rows = torch.randint(0, len(SEEDS), (300,), device=device)
    positions = torch.randint(0, 1 << 20, (300,), device=device)
    expected = [uniform(SEEDS[row], position) for row, position in zip(rows.tolist(), positions.tolist(), strict=True)]
    assert randoms_at(states, rows, positions).tolist() == expected
    assert randoms_reference(states, rows, positions).tolist() == expected
    assert randoms_at(states, rows[:0], positions[:0]).tolist() == []


@settings(deadline=None, max_examples=20)
@given(drafts=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), data=st.data(), counted=st.booleans())
def test_drafts_are_taken_up_to_the_first_token_that_differs(
    drafts: list[list[int]], data: st.DataObject, counted: bool
) -> None:
    sampled = [data.draw(st.lists(st.integers(NO_TOKEN, 2), min_size=len(d) + 1, max_size=len(d) + 1)) for d in drafts]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = torch.tensor([len(draft) for draft in drafts], dtype=torch.int32, device=device)
    starts = (lengths + 1).cumsum(0, dtype=torch.int32) - lengths - 1
    tokens = torch.tensor([token for row in sampled for token in row], dtype=torch.int64, device=device)
    inputs = torch.tensor([token for draft in drafts for token in (99, *draft)], dtype=torch.int64, device=device)
    rows = torch.arange(len(drafts), device=device).flip(0)
    states = []
    for op in (record_tokens, record_reference):
        positions, last = torch.arange(9, device=device), torch.full((9,), -7, device=device)
        slots = torch.tensor([0, -1, 2, 1, -1, 3, -1, -1, -1], dtype=torch.int32, device=device)
        seen = TokenCounts(slots, torch.ones(4, 5, dtype=torch.int32, device=device)) if counted else None
        if torch.cuda.is_available():
            taken = op(tokens, inputs, starts, lengths, rows, positions, last, seen)
        else:
            with gpu.interpreted():
                taken = op(tokens, inputs, starts, lengths, rows, positions, last, seen)
        states.append((taken, positions, last, torch.zeros(0) if seen is None else seen.counts))
    for state, other in zip(*states, strict=True):
        assert torch.equal(state, other)
    for draft, tokens_of, count in zip(drafts, sampled, states[0][0].tolist(), strict=True):
        assert tokens_of[: count - 1] == draft[: count - 1]
        assert count == len(tokens_of) or tokens_of[count - 1] != draft[count - 1]

"""State of sampling by row of a table, which changes with each sampled token without a copy to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.adjust_logits import TokenCounts

_MASK64 = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_state(seed: int) -> int:
    """The state of `randoms_at` for a seed, as a signed integer of 64 bits."""
    return _signed(_mix(seed & _MASK64))


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends only on its arguments (SplitMix64, Steele et al. 2014).

    The n-th token of a sequence is thus the same in any batch and after preemption.
    """
    return (_mix(_mix(seed & _MASK64) ^ position) >> 11) / (1 << 53)


def randoms_at(states: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """(n,) float64: `uniform` of the seed of a row and a position.

    Args:
        states: (table rows,) int64 the `random_state` of each row's seed.
        rows: (n,) int64 rows of the table.
        positions: (n,) int64.
    """
    if gpu.supports(states, rows, positions):
        from quire.kernels.triton import sampling_state as kernel

        return kernel.randoms_at(states, rows, positions)
    return randoms_reference(states, rows, positions)


def randoms_reference(states: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """`randoms_at` in torch."""
    mixed = (states[rows] ^ positions) + _signed(_GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    return _shifted(mixed ^ _shifted(mixed, 31), 11).double() / (1 << 53)


def record_tokens(
    tokens: Tensor,
    inputs: Tensor,
    starts: Tensor,
    drafted: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    seen: TokenCounts | None,
) -> Tensor:
    """Verify the drafts of sequences, and count the tokens that they generate.

    A sequence takes the token of its first row of logits, and the token of a later one if the tokens of all rows before
    equal the draft.

    Args:
        tokens: (n,) int64 a token sampled from each row of logits; the rows of a sequence follow each other.
        inputs: (n,) int64 the token whose logits each row has; the first of a sequence is not read.
        starts: (sequences,) int32 the first row of each sequence.
        drafted: (sequences,) int32 tokens of its draft.
        rows: (sequences,) int64 rows of the table, all different.
        positions: (table rows,) int64 generated tokens, increased by those that are taken.
        last_tokens: (table rows,) int64, set to the last token that is taken.
        seen: to which taken tokens are added; None if no row has penalties.

    Returns:
        (sequences,) int32 the number of tokens that each sequence takes.
    """
    tensors = tokens, inputs, starts, drafted, rows, positions, last_tokens
    if gpu.supports(*tensors):
        from quire.kernels.triton import sampling_state as kernel

        return kernel.record_tokens(*tensors, *((None, None) if seen is None else (seen.slots, seen.counts)))
    return record_reference(*tensors, seen)


def record_reference(
    tokens: Tensor,
    inputs: Tensor,
    starts: Tensor,
    drafted: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    seen: TokenCounts | None,
) -> Tensor:
    """`record_tokens` in torch."""
    taken = []
    for row, start, length in zip(rows.tolist(), starts.tolist(), drafted.tolist(), strict=True):
        sampled, draft = tokens[start : start + length + 1], inputs[start + 1 : start + length + 1]
        count = 1 + int((sampled[:-1] == draft).cumprod(0).sum())
        sampled = sampled.clamp(min=0)  # any token, if there is none
        if seen is not None and seen.slots[row] >= 0:
            seen.counts[seen.slots[row]].index_add_(0, sampled[:count], torch.ones_like(sampled[:count]).int())
        last_tokens[row] = sampled[count - 1]
        positions[row] += count
        taken.append(count)
    return torch.tensor(taken, dtype=torch.int32, device=tokens.device)


def _mix(state: int) -> int:
    state = (state + _GAMMA) & _MASK64
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK64
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK64
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Values as unsigned integers of 64 bits, shifted to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)

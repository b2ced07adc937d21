"""Biases and penalties of logits, by settings of the rows of a table that are on the logits' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import gpu

IN_PROMPT = 1 << 30  # in `TokenCounts.counts`: the token occurs in the prompt


@dataclass(frozen=True, slots=True)
class Biases:
    """Values that are added to the logits of single tokens.

    Attributes:
        tokens: (table rows, width) int32. A token may occur several times if at most one of its values is finite.
        values: (table rows, width) float32.
        limits: (table rows, width) int32; a bias is added while fewer tokens than this were generated.
        counts: (table rows,) int32 biases of each row.
    """

    tokens: Tensor
    values: Tensor
    limits: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token occurred, for the rows that have penalties.

    Attributes:
        slots: (table rows,) int32 the row of `counts`; -1 for rows without penalties.
        counts: (slots, vocab) int32: how often a token was generated; plus `IN_PROMPT` if it occurs in the prompt.
    """

    slots: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, frequency and presence penalties, each (table rows,) float32."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def add_biases(logits: Tensor, rows: Tensor, positions: Tensor, biases: Biases) -> None:
    """Add biases to logits (n, vocab) float32 in place.

    Args:
        rows: (n,) int64 rows of the table.
        positions: (n,) int64 tokens that were generated before each row of logits.
    """
    parts = biases.tokens, biases.values, biases.limits, biases.counts
    if gpu.supports(logits, rows, positions, *parts) and logits.stride(1) == 1:
        from quire.kernels.triton import adjust_logits as kernel

        kernel.add_biases(logits, rows, positions, *parts)
        return
    add_biases_reference(logits, rows, positions, biases)


def add_biases_reference(logits: Tensor, rows: Tensor, positions: Tensor, biases: Biases) -> None:
    """`add_biases` in torch."""
    present = torch.arange(biases.tokens.shape[1], device=logits.device) < biases.counts[rows, None]
    applies = present & (positions[:, None] < biases.limits[rows])
    values = biases.values[rows].masked_fill(~applies, 0.0)
    logits.scatter_add_(1, biases.tokens[rows].long().masked_fill(~applies, 0), values)


def penalize(
    logits: Tensor, rows: Tensor, depths: Tensor, inputs: Tensor, seen: TokenCounts, penalties: Penalties
) -> None:
    """Apply penalties to logits (n, vocab) float32 in place.

    Repetition counts prompt and output, the others the output. The rows of a sequence follow each other: the row of its
    last token, then those of its draft; they count the tokens of the draft up to their own as output.

    Args:
        rows: (n,) int64 rows of the table.
        depths: (n,) int32 place of each row in the draft: 0 for the last token, 1 for the draft's first.
        inputs: (n,) int64 the token whose logits each row has; not read where the depth is 0.
    """
    parts = penalties.repetition, penalties.frequency, penalties.presence
    if gpu.supports(logits, rows, depths, inputs, seen.slots, seen.counts, *parts) and logits.stride(1) == 1:
        from quire.kernels.triton import adjust_logits as kernel

        kernel.penalize(logits, rows, depths, inputs, seen.slots, seen.counts, *parts)
        return
    penalize_reference(logits, rows, depths, inputs, seen, penalties)


def penalize_reference(
    logits: Tensor, rows: Tensor, depths: Tensor, inputs: Tensor, seen: TokenCounts, penalties: Penalties
) -> None:
    """`penalize` in torch."""
    slots = seen.slots[rows]
    counted = seen.counts[slots.clamp(min=0).long()]
    generated = (counted % IN_PROMPT).float()
    ids = torch.arange(len(inputs), device=logits.device)
    drafted = (ids[:, None] >= ids) & (ids > ids[:, None] - depths[:, None])  # (n, n): the drafts in front of each row
    one_hot = torch.zeros_like(logits).scatter_(1, inputs[:, None], 1.0)
    generated += drafted.float() @ one_hot.where(depths[:, None] > 0, 0.0)
    repetition, frequency, presence = (
        part[rows, None] for part in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    occurred = generated > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where((counted >= IN_PROMPT) | occurred, scaled, logits)
    changed = changed - generated * frequency - occurred.float() * presence
    logits.copy_(torch.where((slots >= 0)[:, None], changed, logits))

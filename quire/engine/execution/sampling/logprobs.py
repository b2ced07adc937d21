"""Log-probabilities of the raw logits, before penalties, biases and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.client.protocol import TokenLogprobs
from quire.kernels.token_logprobs import token_logprobs


def top_logprobs(
    logits: Tensor, tokens: Sequence[int], alternatives: int, listed: Sequence[tuple[int, ...]] = ()
) -> list[TokenLogprobs]:
    """Return for each row of raw logits (rows, vocab) its token, then the `alternatives` top tokens.

    `listed`: tokens to report in place of the top tokens, for each row; empty for rows that report the top tokens.
    """
    reported = token_logprobs(logits, torch.tensor(tokens, device=logits.device), alternatives)
    rows = zip(tokens, *(values.tolist() for values in reported), strict=True)
    entries = [
        TokenLogprobs([token, *top_ids], [value, *top], [rank, *range(1, len(top) + 1)])
        for token, value, rank, top_ids, top in rows
    ]
    for row, chosen in enumerate(listed):
        if chosen:
            entries[row] = _listed(entries[row], logits[row].log_softmax(-1), chosen)
    return entries


def _listed(entry: TokenLogprobs, logprobs: Tensor, chosen: tuple[int, ...]) -> TokenLogprobs:
    """The token of an entry, then the chosen ones."""
    values = logprobs[torch.tensor(chosen, device=logprobs.device)].tolist()
    return TokenLogprobs(
        [entry.token_ids[0], *chosen], [entry.logprobs[0], *values], [entry.ranks[0], *([0] * len(chosen))]
    )

"""Tokens chosen from logits by per-row settings that are on the logits' device, without a copy to the host.

The rule is that of `quire.engine.execution.sampling.token_sampling`: a random number gives the same token, except
where it is so close to the border of two tokens that rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.sampling import NO_TOKEN, has_token


@dataclass(frozen=True, slots=True)
class ChoiceSettings:
    """How the token of each row is chosen.

    Attributes:
        temperatures: (rows,) float32; 0 for the largest logit.
        randoms: (rows,) float64 in [0, 1).
        log_min_p: (rows,) float32, the logarithm of min-p; -inf for none.
        top_k: (rows,) int32; 0 for all.
        top_p: (rows,) float32; 1 for all.
        random: whether a row has a temperature and neither top-k nor top-p.
        ranked: whether a row has a temperature and top-k or top-p.
    """

    temperatures: Tensor
    randoms: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    random: bool
    ranked: bool


def argmax(logits: Tensor) -> Tensor:
    """(rows,) int64: the first token with the largest logit in each row of logits (rows, vocab) float32.

    `NO_TOKEN` for a row with NaN, or whose largest logit is infinite.
    """
    if gpu.supports(logits) and logits.stride(1) == 1:
        from quire.kernels.triton import choose_tokens as kernel

        return kernel.argmax(logits)
    return logits.argmax(-1).where(has_token(logits), NO_TOKEN)


def choose_tokens(logits: Tensor, settings: ChoiceSettings) -> Tensor:
    """(rows,) int64: a token for each row of logits (rows, vocab) float32.

    The first of the largest logits; or the token where the running sum of probabilities exceeds random * total: in
    order of ids, or with top-k or top-p in descending order of logits, equal ones by id. `NO_TOKEN` as in `argmax`.
    """
    if gpu.supports(logits, settings.temperatures) and logits.stride(1) == 1:
        from quire.kernels.triton import choose_tokens as kernel

        return kernel.choose_tokens(
            logits,
            settings.temperatures,
            settings.randoms,
            settings.log_min_p,
            settings.top_k,
            settings.top_p,
            random=settings.random,
            ranked=settings.ranked,
        )
    return reference(logits, settings)


def reference(logits: Tensor, settings: ChoiceSettings) -> Tensor:
    """`choose_tokens` in torch."""
    vocab = logits.shape[1]
    temperatures = settings.temperatures[:, None]
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)
    scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + settings.log_min_p[:, None], -torch.inf)
    ranked = ((settings.top_k > 0) | (settings.top_p < 1))[:, None]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    ids = torch.arange(vocab, device=logits.device).expand_as(order)
    order, values = torch.where(ranked, order, ids), torch.where(ranked, values, scaled)
    top_k = torch.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    probs = values.masked_fill(ranked & (ids >= top_k), -torch.inf).softmax(-1, dtype=torch.float64)
    dropped = ranked & (ids > 0) & (probs.cumsum(-1) - probs >= settings.top_p[:, None])
    sums = probs.masked_fill(dropped, 0.0).cumsum(-1)
    places = torch.searchsorted(sums, settings.randoms[:, None] * sums[:, -1:], right=True).clamp_(max=vocab - 1)
    chosen = torch.where(settings.temperatures > 0, order.gather(-1, places)[:, 0], logits.argmax(-1))
    return chosen.where(has_token(logits), NO_TOKEN)

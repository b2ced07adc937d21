"""Choosing a token from logits: greedily, or at random after temperature, min-p, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.wire.protocol import SamplingParams

_NUCLEUS = (256, 4096)  # likeliest tokens looked at before a whole vocabulary is sorted for top-p
_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (SplitMix64, Steele et al. 2014).

    A sequence's n-th choice thus comes out the same whatever else is in the batch, and after preemption.
    """
    state = _mix(seed & _MASK64) ^ position
    return (_mix(state) >> 11) / (1 << 53)


def choose(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """One token for each row of logits (rows, vocab), which may be changed. `randoms` are in [0, 1)."""
    chosen = logits.argmax(-1).tolist()
    drawn = [i for i, one in enumerate(params) if one.temperature > 0]
    if drawn:
        rows = logits[drawn] if len(drawn) < len(params) else logits
        tokens = _draw(rows, [params[i] for i in drawn], torch.tensor([randoms[i] for i in drawn], dtype=torch.float64))
        for i, token in zip(drawn, tokens, strict=True):
            chosen[i] = token
    return chosen


def _draw(logits: Tensor, params: Sequence[SamplingParams], randoms: Tensor) -> list[int]:
    logits = logits / torch.tensor([[one.temperature] for one in params], dtype=torch.float32)
    if any(one.min_p for one in params):
        floors = [[math.log(one.min_p) if one.min_p else -math.inf] for one in params]
        floor = torch.tensor(floors, dtype=torch.float32)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floor, -torch.inf)
    narrow = [i for i, one in enumerate(params) if one.top_k or one.top_p < 1]
    if not narrow:
        return _invert(logits.softmax(-1), randoms)
    tokens = [0] * len(params)
    wide = [i for i in range(len(params)) if i not in set(narrow)]
    for rows, pick in ((wide, _draw_wide), (narrow, _draw_narrow)):
        if rows:
            picked = pick(logits[rows], [params[i] for i in rows], randoms[rows])
            for i, token in zip(rows, picked, strict=True):
                tokens[i] = token
    return tokens


def _draw_wide(logits: Tensor, _: Sequence[SamplingParams], randoms: Tensor) -> list[int]:
    return _invert(logits.softmax(-1), randoms)


def _draw_narrow(logits: Tensor, params: Sequence[SamplingParams], randoms: Tensor) -> list[int]:
    """Top-k, then top-p among these; rows have at least one of them."""
    vocab = logits.shape[-1]
    top_k = torch.tensor([[one.top_k if 0 < one.top_k < vocab else vocab] for one in params])
    top_p = torch.tensor([[one.top_p] for one in params], dtype=torch.float32)
    limited = top_k < vocab
    total = None if bool(limited.all()) else logits.logsumexp(-1, keepdim=True)
    values, ids = _likeliest(logits, top_k, top_p, total)
    values.masked_fill_(torch.arange(values.shape[-1]) >= top_k, -torch.inf)
    kept = values.logsumexp(-1, keepdim=True)
    whole = kept if total is None else torch.where(limited, kept, total)
    probs = (values - whole).exp()
    dropped = probs.cumsum(-1) - probs >= top_p
    dropped[:, 0] = False  # the likeliest token always stays
    picked = _invert(probs.masked_fill_(dropped, 0.0), randoms)
    return ids.gather(-1, torch.tensor(picked)[:, None])[:, 0].tolist()


def _likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values and ids of at least those tokens that top-k or top-p leaves of each row, likeliest first.

    Of equally likely tokens the smallest id comes first, so that a row's tokens do not depend on how many are looked
    at, and thus on the other rows. `total`: log of a row's whole weight, if any row has no top-k.
    """
    vocab = logits.shape[-1]
    limited = top_k < vocab
    deepest = int(top_k.where(limited, 0).max())
    for width in (width for width in _NUCLEUS if deepest < width < vocab):
        values, ids = _ordered(*logits.topk(width, -1, sorted=False))
        last = values[:, -1:]
        sure = values > last  # others that are as likely as the last one may be missing
        enough = (sure.sum(-1, keepdim=True) >= top_k) | (last == -torch.inf)
        if total is not None:
            mass = (values - total).exp().mul_(sure).sum(-1, keepdim=True)
            enough |= ~limited & (mass >= top_p)
        if bool(enough.all()):
            return values, ids
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values, ids


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _invert(probs: Tensor, randoms: Tensor) -> list[int]:
    """The tokens at which the running sums of unnormalised probabilities pass the random shares of their totals."""
    sums = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, randoms[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1).tolist()


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)

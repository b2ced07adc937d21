"""Choosing a token from logits: greedily, or at random after temperature, min-p, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.engine.wire.protocol import SamplingParams
from quire.kernels.sampling import argmax, invert, sample

_Way = Callable[[Tensor, Sequence[SamplingParams], Sequence[float]], list[int]]
_NUCLEUS = (256, 4096)  # likeliest tokens looked at before a whole vocabulary is sorted for top-p
_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (SplitMix64, Steele et al. 2014).

    A sequence's n-th choice thus comes out the same whatever else is in the batch, and after preemption.
    """
    state = _mix(seed & _MASK64) ^ position
    return (_mix(state) >> 11) / (1 << 53)


def choose(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """One token for each row of logits (rows, vocab). `randoms` are in [0, 1)."""
    chosen = [0] * len(params)
    groups: dict[_Way, list[int]] = {}
    for i, one in enumerate(params):
        groups.setdefault(_way(one), []).append(i)
    for way, rows in groups.items():
        own = logits if len(rows) == len(logits) else logits[rows]
        tokens = way(own, [params[i] for i in rows], [randoms[i] for i in rows])
        for i, token in zip(rows, tokens, strict=True):
            chosen[i] = token
    return chosen


def _way(one: SamplingParams) -> _Way:
    """How a row is chosen from. It depends on nothing but its own params, or neighbours would change its roundings."""
    if one.temperature == 0:
        return _greedy
    if one.top_k or one.top_p < 1:
        return _narrow
    return _floored if one.min_p else _plain


def _greedy(logits: Tensor, *_: object) -> list[int]:
    return argmax(logits)


def _plain(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    return sample(logits, [one.temperature for one in params], randoms)


def _floored(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    return sample(_tempered(logits, params), [1.0] * len(params), randoms)


def _tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits by temperature, without what min-p takes away."""
    logits = logits / torch.tensor([[one.temperature] for one in params], dtype=torch.float32)
    if any(one.min_p for one in params):
        floors = [[math.log(one.min_p) if one.min_p else -math.inf] for one in params]
        floor = torch.tensor(floors, dtype=torch.float32)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floor, -torch.inf)
    return logits


def _narrow(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """Top-k, then top-p among these; rows have at least one of them."""
    logits, vocab = _tempered(logits, params), logits.shape[-1]
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
    picked = invert(probs.masked_fill_(dropped, 0.0), torch.tensor(randoms, dtype=torch.float64))
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


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)

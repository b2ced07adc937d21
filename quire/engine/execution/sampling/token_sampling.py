"""Sampling of tokens from logits: greedy, or random after temperature, min-p, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.sampling.row_settings import is_ranked
from quire.kernels.sampling import argmax, has_token, sample, sample_by_inverse_cdf

_SampleRows = Callable[[Tensor, Sequence[SamplingParams], Sequence[float]], list[int]]
_TOP_P_WIDTHS = (256, 4096)  # numbers of top tokens tried before the whole vocabulary is sorted


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """Sample a token from each row of logits (rows, vocab), `NO_TOKEN` if it has none. `randoms` are in [0, 1)."""
    chosen = [0] * len(params)
    groups: dict[_SampleRows, list[int]] = {}
    for i, row_params in enumerate(params):
        groups.setdefault(_sample_function(row_params), []).append(i)
    for sample_rows, rows in groups.items():
        selected = logits if len(rows) == len(logits) else logits[rows]
        tokens = sample_rows(selected, [params[i] for i in rows], [randoms[i] for i in rows])
        for i, token in zip(rows, tokens, strict=True):
            chosen[i] = token
    return chosen


def _sample_function(params: SamplingParams) -> _SampleRows:
    """The sampling function of a row. It depends only on the row's params, so other rows cannot change its rounding."""
    if params.temperature == 0:
        return _greedy
    if is_ranked(params):
        return _sample_top_k_top_p
    return _sample_min_p if params.min_p else _sample_all


def _greedy(logits: Tensor, *_: object) -> list[int]:
    return argmax(logits)


def _sample_all(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    return sample(logits, [row_params.temperature for row_params in params], randoms)


def _sample_min_p(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    return sample(_apply_temperature_min_p(logits, params), [1.0] * len(params), randoms)


def _apply_temperature_min_p(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divide logits by temperature and mask the tokens that min-p excludes."""
    logits = logits / torch.tensor([[row_params.temperature] for row_params in params], dtype=torch.float32)
    if any(row_params.min_p for row_params in params):
        floors = [[math.log(row_params.min_p) if row_params.min_p else -math.inf] for row_params in params]
        floor = torch.tensor(floors, dtype=torch.float32)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floor, -torch.inf)
    return logits


def _sample_top_k_top_p(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """Top-k, then top-p among the remaining tokens; each row has at least one of the two."""
    logits, vocab = _apply_temperature_min_p(logits, params), logits.shape[-1]
    top_k = torch.tensor([[row_params.top_k if 0 < row_params.top_k < vocab else vocab] for row_params in params])
    top_p = torch.tensor([[row_params.top_p] for row_params in params], dtype=torch.float32)
    limited = top_k < vocab
    total = None if bool(limited.all()) else logits.logsumexp(-1, keepdim=True)
    values, ids = _top_tokens(logits, top_k, top_p, total)
    values.masked_fill_(torch.arange(values.shape[-1]) >= top_k, -torch.inf)
    top_k_log_total = values.logsumexp(-1, keepdim=True)
    log_total = top_k_log_total if total is None else torch.where(limited, top_k_log_total, total)
    probs = (values - log_total).exp()
    dropped = probs.cumsum(-1) - probs >= top_p
    dropped[:, 0] = False  # the top token is always kept
    valid = has_token(values[:, :1])  # values are in descending order, NaN first
    places = sample_by_inverse_cdf(probs.masked_fill_(dropped, 0.0), torch.tensor(randoms, dtype=torch.float64), valid)
    chosen = torch.tensor(places)
    return ids.gather(-1, chosen.clamp(min=0)[:, None])[:, 0].where(valid, chosen).tolist()


def _top_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values and ids of at least the tokens that top-k and top-p keep of each row, in descending order of logits.

    Tokens with equal logits are ordered by id, so that a row's tokens do not depend on the number of top tokens tried,
    and thus on the other rows. `total`: logsumexp of each row, if any row has no top-k.
    """
    vocab = logits.shape[-1]
    limited = top_k < vocab
    max_top_k = int(top_k.where(limited, 0).max())
    for width in (width for width in _TOP_P_WIDTHS if max_top_k < width < vocab):
        values, ids = _sort_by_value_then_id(*logits.topk(width, -1, sorted=False))
        last = values[:, -1:]
        complete = values > last  # tokens that are equal to the last one may be missing
        enough = (complete.sum(-1, keepdim=True) >= top_k) | (last == -torch.inf)
        if total is not None:
            mass = (values - total).exp().mul_(complete).sum(-1, keepdim=True)
            enough |= ~limited & (mass >= top_p)
        if bool(enough.all()):
            return values, ids
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values, ids


def _sort_by_value_then_id(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)

"""Token bitmasks over logits, and tokens chosen from logits, on the CPU.

Those of logits that stay on another device: `quire.kernels.token_bitmask` and `choose_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import native

Masks = NDArray[np.uint32]
NO_TOKEN = -1  # of a row with NaN, or whose largest logit is infinite


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in the bitmask of a vocabulary."""
    return (vocab_size + 31) // 32


def _is_supported(logits: Tensor) -> bool:
    return native.supports(logits) and logits.dtype is torch.float32 and logits.is_contiguous()


def apply_token_bitmask(logits: Tensor, masks: Masks, pairs: Sequence[tuple[int, int]]) -> None:
    """Set the logits of tokens to -inf that a bitmask does not allow.

    If the logits of all allowed tokens are -inf, the mask alone decides: all of them become 0. NaN stays NaN.

    Args:
        logits: (rows, vocab) float32, changed in place.
        masks: (masks, words); bit i % 32 of word i // 32 says whether token i is allowed.
        pairs: rows of logits, each with the row of its mask.
    """
    if _is_supported(logits):
        native.kernels.apply_token_bitmask(
            logits=logits,
            masks=torch.from_numpy(masks.view(np.int32)),
            pairs=torch.from_numpy(np.array(pairs, np.int64).reshape(-1, 2)),
        )
        return
    for row, mask in pairs:
        _mask_row(logits[row], masks[mask])


def _mask_row(logits: Tensor, mask: NDArray[np.uint32]) -> None:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    forbidden = torch.from_numpy(bits == 0)
    logits.masked_fill_(forbidden & ~logits.isnan(), -torch.inf)
    if logits.amax().item() == -torch.inf:
        logits.zero_().masked_fill_(forbidden, -torch.inf)


def argmax(logits: Tensor) -> list[int]:
    """The token with the largest logit in each row of logits (rows, vocab) float32; the first of equal ones.

    `NO_TOKEN` for a row without a valid one.
    """
    if not _is_supported(logits):
        return logits.argmax(-1).where(has_token(logits), NO_TOKEN).tolist()
    tokens: list[int] = native.kernels.argmax(logits=logits)
    return tokens


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    randoms: Sequence[float],
    *,
    min_ps: Sequence[float] | None = None,
    top_ks: Sequence[int] | None = None,
    top_ps: Sequence[float] | None = None,
) -> list[int]:
    """The token of each row of logits (rows, vocab) float32; see `choose_tokens_reference`.

    Args:
        logits: (rows, vocab) float32.
        temperatures: of each row; 0 for the largest logit.
        randoms: of each row, in [0, 1).
        min_ps: of each row; 0, or None, for none.
        top_ks: of each row; 0, or None, for all.
        top_ps: of each row; 1, or None, for all.
    """
    rows = len(temperatures)
    min_ps, top_ks, top_ps = min_ps or [0.0] * rows, top_ks or [0] * rows, top_ps or [1.0] * rows
    if not _is_supported(logits):
        log_min_p = [math.log(min_p) if min_p else -math.inf for min_p in min_ps]
        chosen: list[int] = choose_tokens_reference(
            logits,
            ChoiceSettings(
                temperatures=torch.tensor(temperatures, dtype=torch.float32),
                randoms=torch.tensor(randoms, dtype=torch.float64),
                log_min_p=torch.tensor(log_min_p, dtype=torch.float32),
                top_k=torch.tensor(top_ks, dtype=torch.int32),
                top_p=torch.tensor(top_ps, dtype=torch.float32),
                random=True,
                ranked=any(top_k > 0 or top_p < 1 for top_k, top_p in zip(top_ks, top_ps, strict=True)),
            ),
        ).tolist()
        return chosen
    tokens: list[int] = native.kernels.sample(
        logits=logits,
        temperatures=list(temperatures),
        min_ps=list(min_ps),
        top_ks=list(top_ks),
        top_ps=list(top_ps),
        randoms=list(randoms),
    )
    return tokens


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """How tokens are chosen in steps that follow each other.

    Attributes:
        temperatures: of each row; 0 for the largest logit.
        min_ps: of each row; 0 for none.
        top_ks: of each row; 0 for all.
        top_ps: of each row; 1 for all.
        randoms: of each row in the first step, then in the others, in [0, 1).
        ends: tokens that may end the sequence of a row: no step follows one in which a row has one of them.
        steps: at most.
    """

    temperatures: list[float]
    min_ps: list[float]
    top_ks: list[int]
    top_ps: list[float]
    randoms: list[float]
    ends: list[int]
    steps: int


def has_token(logits: Tensor) -> Tensor:
    """Whether each row of logits (rows, vocab) has a token: its largest logit is neither NaN nor infinite."""
    return logits.amax(-1) < torch.inf


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


def choose_tokens_reference(logits: Tensor, settings: ChoiceSettings) -> Tensor:
    """(rows,) int64: a token for each row of logits (rows, vocab) float32, chosen by torch.

    The first of the largest logits; or the token where the running sum of probabilities exceeds random * total: in
    order of ids, or with top-k or top-p in descending order of logits, equal ones by id. `NO_TOKEN` as in `argmax`.
    """
    vocab = logits.shape[1]
    temperatures = settings.temperatures[:, None]
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)
    scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + settings.log_min_p[:, None], -torch.inf)
    probs, order = scaled.softmax(-1, dtype=torch.float64), torch.arange(vocab, device=logits.device).expand_as(logits)
    if settings.ranked:
        probs, order = _ranked(scaled, probs, order, settings)
    sums = probs.cumsum(-1)
    places = torch.searchsorted(sums, settings.randoms[:, None] * sums[:, -1:], right=True).clamp_(max=vocab - 1)
    chosen = torch.where(settings.temperatures > 0, order.gather(-1, places)[:, 0], logits.argmax(-1))
    return chosen.where(has_token(logits), NO_TOKEN)


def _ranked(scaled: Tensor, probs: Tensor, ids: Tensor, settings: ChoiceSettings) -> tuple[Tensor, Tensor]:
    """Probabilities, and the tokens that have them: in rows with top-k or top-p those that these keep, largest first.

    Args:
        scaled: (rows, vocab) logits over temperature.
        probs: (rows, vocab) float64 probabilities of all tokens.
        ids: (rows, vocab) the tokens in order.
        settings: top-k and top-p.
    """
    ranked = ((settings.top_k > 0) | (settings.top_p < 1))[:, None]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = torch.where(settings.top_k > 0, settings.top_k, scaled.shape[1])[:, None]
    top_probs = values.masked_fill(ids >= top_k, -torch.inf).softmax(-1, dtype=torch.float64)
    dropped = (ids > 0) & (top_probs.cumsum(-1) - top_probs >= settings.top_p[:, None])
    return torch.where(ranked, top_probs.masked_fill(dropped, 0.0), probs), torch.where(ranked, order, ids)

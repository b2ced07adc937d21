"""Log-probabilities of chosen and of top tokens, on the logits' device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import gpu, native


class Logprobs(NamedTuple):
    """Log-probabilities of rows of logits.

    Attributes:
        chosen: (rows,) float32 those of the rows' tokens.
        ranks: (rows,) int64 ranks of these tokens, from 1: tokens of the same log-probability have the same rank.
        top_ids: (rows, top) int64 the most likely tokens; equal ones by id.
        top: (rows, top) float32 their log-probabilities.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-probabilities of a token of each row and of the `top` most likely ones.

    Args:
        logits: (rows, vocab) float32.
        tokens: (rows,) int64; the results of a row with `NO_TOKEN` are undefined.
    """
    top = min(top, logits.shape[1])
    if gpu.supports(logits, tokens) and logits.stride(1) == 1:
        from quire.kernels.triton import token_logprobs as kernel

        return Logprobs(*kernel.token_logprobs(logits, tokens, top))
    if native.supports(logits) and logits.dtype is torch.float32 and logits.is_contiguous():
        rows = len(logits)
        out = Logprobs(
            torch.empty(rows),
            torch.empty(rows, dtype=torch.int64),
            torch.empty(rows, top, dtype=torch.int64),
            torch.empty(rows, top),
        )
        native.kernels.token_logprobs(logits, tokens.clamp(min=0), *out)
        return out
    return reference(logits, tokens, top)


def reference(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """`token_logprobs` in torch."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.clamp(min=0)[:, None])
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(-1) + 1, order, logprobs.gather(-1, order))

"""Tokens chosen from logits by per-row settings that are on the logits' device, without a copy to the host.

The rule is that of `choose_tokens_reference` in `quire.kernels.sampling`: a random number gives the same token, except
where it is so close to the border of two tokens that rounding decides.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import gpu
from quire.kernels.sampling import NO_TOKEN, ChoiceSettings, choose_tokens_reference, has_token


def argmax(logits: Tensor) -> Tensor:
    """(rows,) int64: the first token with the largest logit in each row of logits (rows, vocab) float32.

    `NO_TOKEN` for a row with NaN, or whose largest logit is infinite.
    """
    if gpu.supports(logits) and logits.stride(1) == 1:
        from quire.kernels.triton import choose_tokens as kernel

        return kernel.argmax(logits)
    return logits.argmax(-1).where(has_token(logits), NO_TOKEN)


def choose_tokens(logits: Tensor, settings: ChoiceSettings) -> Tensor:
    """(rows,) int64: a token for each row of logits (rows, vocab) float32; see `choose_tokens_reference`."""
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
    return choose_tokens_reference(logits, settings)

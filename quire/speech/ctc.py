"""Tokens from the most likely one at each position of a CTC model (Graves et al. 2006)."""

from __future__ import annotations

import numpy as np

from quire.engine.client.protocol import PooledArray
from quire.speech.aligned_words import AlignedToken


def collapse(positions: PooledArray, blank: int) -> list[AlignedToken]:
    """The tokens in the most likely path: equal neighbours are one token, blanks are none.

    Args:
        positions: (positions, 2), see the task "ctc" of `PoolingParams`.
        blank: the token that stands for no text.
    """
    if not len(positions):
        return []
    tokens = positions[:, 0].astype(np.int64)
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
    ends = [*starts[1:].tolist(), len(tokens)]
    logprobs = np.maximum.reduceat(positions[:, 1], starts)
    runs = zip(tokens[starts].tolist(), logprobs.tolist(), starts.tolist(), ends, strict=True)
    return [AlignedToken(*run) for run in runs if run[0] != blank]

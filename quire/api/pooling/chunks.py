"""Embeddings of texts beyond the context length: in chunks, of which the mean is taken, weighted by their tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray, TokenArray

_LENGTH_TOLERANCE = 1e-2  # of an embedding of length 1, which bfloat16 rounds


class ChunkedInputs:
    """Which chunks the inputs of a request have. Chunks are numbered in the order of the inputs.

    Attributes:
        any_split: some input is longer than a chunk.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: of a chunk."""
        self._max_tokens = max_tokens
        self._first: list[int] = []  # the first chunk of each input
        self._weights: list[int] = []  # of each chunk
        self._activations: list[bool | None] = []  # of each input
        self.any_split = False

    def split(self, tokens: TokenArray, params: PoolingParams) -> list[tuple[TokenArray, PoolingParams]]:
        """The chunks of the next input, and their parameters. What is not pooled is in none, if it fills it."""
        self._first.append(len(self._weights))
        self._activations.append(params.use_activation)
        size = self._max_tokens
        if len(tokens) <= size:
            self._weights.append(1)
            return [(tokens, params)]
        self.any_split = True
        chunks = []
        for start in range(0, len(tokens), size):
            chunk, skipped = tokens[start : start + size], max(0, params.skip_tokens - start)
            if skipped < len(chunk):
                chunks.append((chunk, msgspec.structs.replace(params, skip_tokens=skipped)))
                self._weights.append(len(chunk) - skipped)
        return chunks

    def input_of(self, chunk: int) -> int:
        """The index of the input that a chunk belongs to."""
        return bisect_right(self._first, chunk) - 1

    def merge(self, arrays: Sequence[PooledArray]) -> list[PooledArray]:
        """The results of the inputs, from those of all chunks."""
        ends = [*self._first[1:], len(self._weights)]
        return [
            arrays[first]
            if end - first == 1
            else _mean(arrays[first:end], self._weights[first:end], normalizes=activation is not False)
            for first, end, activation in zip(self._first, ends, self._activations, strict=True)
        ]


def _mean(arrays: Sequence[PooledArray], weights: Sequence[int], *, normalizes: bool) -> PooledArray:
    """The weighted mean; of length 1, if that of all arrays is and it may be normalized."""
    total = np.zeros(arrays[0].shape, np.float32)
    for array, weight in zip(arrays, weights, strict=True):
        total += array * np.float32(weight)
        normalizes = normalizes and abs(float(np.linalg.norm(array)) - 1) <= _LENGTH_TOLERANCE
    total /= sum(weights)
    length = float(np.linalg.norm(total))
    return total / np.float32(length) if normalizes and length else total

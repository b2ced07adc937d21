"""PrefixCache: blocks of the pool, found by the tokens that they hold."""

from __future__ import annotations

from quire.engine.client.protocol import StepStats
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.request import Hasher, Request


class PrefixCache:
    """Registers the full blocks of requests under their hashes, and finds them for other requests."""

    def __init__(self, pool: BlockPool, hasher: Hasher | None) -> None:
        """`hasher`: None if prefix caching is off."""
        self._pool = pool
        self._hasher = hasher

    def cache_full_blocks(self, request: Request, end: int) -> None:
        """Register the blocks that a step fills, which computes a request's tokens up to `end`.

        Already now, before the step runs: it writes the keys and values of all its tokens before any of its queries
        reads them, so a sequence that enters in the same step may share the blocks.
        """
        if self._hasher is None:
            return
        size = self._pool.block_size
        hashes = request.block_hashes(size, self._hasher)
        for index in range(request.num_cached_blocks, end // size):
            self._pool.cache_block(request.blocks[index], hashes[index])
        request.num_cached_blocks = max(request.num_cached_blocks, end // size)

    def record(self, request: Request, hit: int, stats: StepStats) -> None:
        """Count the tokens that a request has found, when it enters the batch for the first time."""
        if request.cached_tokens is None:
            request.cached_tokens = hit
            if self._hasher is not None:
                stats.prefix_queries += len(request.tokens)
                stats.prefix_hits += hit

    def match(self, request: Request) -> list[int]:
        """Cached blocks of the longest known prefix; at least one token is left to compute."""
        longest = request.max_cached_tokens
        if self._hasher is None or longest <= 0:
            return []
        hashes = request.block_hashes(self._pool.block_size, self._hasher)
        return self._pool.match(hashes[: longest // self._pool.block_size])

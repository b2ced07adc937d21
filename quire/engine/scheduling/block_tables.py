"""BlockTables: the blocks of each sequence, by group of layers, and the prefixes that are found by their tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from quire.engine.client.protocol import StepStats
from quire.engine.scheduling.blocks import BlockPool, FilledBlock
from quire.engine.scheduling.request import BlockHash, Hasher, Request
from quire.engine.scheduling.state_snapshots import StateSnapshots
from quire.engine.scheduling.tier_blocks import group_key


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The groups of layers that take blocks from one pool.

    Attributes:
        windows: of each group whose blocks grow with a sequence, the number of positions that a token attends to, its
            own included; None: all.
        has_states: layers keep states of a fixed size, in a slot for each sequence in the batch.
        kept_blocks: last blocks that are out of sight of a sequence and that it holds: a decoder that reads its blocks
            begins at the start of a block, whose tokens attend to them.
    """

    windows: tuple[int | None, ...] = (None,)
    has_states: bool = False
    kept_blocks: int = 0

    def most_blocks(self, length: int, step: int, block_size: int) -> int:
        """Return the most blocks that a sequence holds.

        Args:
            length: its tokens.
            step: the most of them that one step computes, drafts included.
            block_size: tokens of a block.
        """
        whole = -(-length // block_size)
        more = 1 + self.kept_blocks
        in_sight = (
            whole if window is None else -(-(window - 1 + step) // block_size) + more for window in self.windows
        )
        return sum(min(whole, count) for count in in_sight)

    def longest(self, blocks: int, longest: int, step: int, block_size: int) -> int:
        """Return the length of the longest sequence of up to `longest` tokens that `blocks` blocks hold; 0: none."""
        if self.most_blocks(longest, step, block_size) <= blocks:
            return longest
        low, high = 0, longest  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.most_blocks(middle, step, block_size) <= blocks:
                low = middle
            else:
                high = middle
        return low


ONE_GROUP = BlockGroups()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached beginning of a request.

    Attributes:
        count: its length in blocks.
        tables: of each group, a table of that length.
        unseen: of each group, how many of its first blocks are out of sight. They are not held, and may be any number.
        in_memory: blocks at the beginning that the groups without windows have; there may be no states behind them.
    """

    count: int = 0
    tables: list[list[int]] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    in_memory: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks in sight."""
        return [block for table, unseen in zip(self.tables, self.unseen, strict=True) for block in table[unseen:]]


@dataclass(frozen=True, slots=True)
class LackingBlock:
    """A block that a source has, and the pool has not."""

    index: int
    group: int
    key: BlockHash


@dataclass(frozen=True, slots=True)
class LoadablePrefix:
    """The beginning of a request that is cached in memory and in a source.

    Attributes:
        count: its length in blocks.
        held: those in memory that are in sight.
        lacking: those that are in the source alone, the first ones of the sequence first.
    """

    count: int
    held: list[int]
    lacking: list[LackingBlock]


class BlockTables:
    """Take the blocks of requests from the pool, and give them back.

    All groups have as many blocks, of which those that no further token attends to are given back early.
    """

    def __init__(
        self, pool: BlockPool, groups: BlockGroups, hasher: Hasher | None, snapshots: StateSnapshots | None = None
    ) -> None:
        """Make tables.

        Args:
            pool: has the blocks.
            groups: the groups of layers.
            hasher: hash function of the prefix cache; None: there is none.
            snapshots: the saved states of models that have some; None: their prefix cache is not read.
        """
        self._pool = pool
        self._groups = groups
        self._count = len(groups.windows)
        self._windows = [(index, window) for index, window in enumerate(groups.windows) if window is not None]
        self._full = [index for index, window in enumerate(groups.windows) if window is None]
        self._snapshots = snapshots
        self._hasher = None if groups.has_states and snapshots is None else hasher
        self._filled: list[FilledBlock] = []  # by the step that is being planned

    def match(self, request: Request) -> Prefix:
        """Return the longest cached prefix; at least one token is left to compute.

        It is as long as all blocks of the groups without windows are cached, and of the others those that the next
        token attends to. If layers have states, there is a snapshot of them at its end.
        """
        longest = request.max_cached_tokens
        if self._hasher is None or longest <= 0:
            return self._prefix(request, 0, [])
        size = self._pool.block_size
        hashes = request.block_hashes(size, self._hasher)[: longest // size]
        cached = {group: self._pool.match(_keys(hashes, group)) for group in self._full}
        count = in_memory = min(map(len, cached.values()), default=len(hashes))
        if self._snapshots is None:
            while count and (missing := self._missing(request, hashes, count, self._pool.has)) is not None:
                count = missing
        else:
            begins = (
                count
                for count in self._snapshots.counts(hashes[:in_memory])
                if self._missing(request, hashes, count, self._pool.has) is None
            )
            count = next(begins, 0)
        tables = [cached[group][:count] if group in cached else [0] * count for group in range(self._count)]
        for group, window in self._windows:
            first = self._first_seen(request, count * size, window)
            tables[group][first:] = self._pool.match(_keys(hashes[first:count], group))
        return self._prefix(request, count, tables, in_memory)

    def _prefix(self, request: Request, count: int, tables: list[list[int]], in_memory: int = 0) -> Prefix:
        unseen = [0] * self._count
        for group, window in self._windows:
            unseen[group] = self._first_seen(request, count * self._pool.block_size, window)
        return Prefix(count, tables or [[] for _ in unseen], unseen, in_memory)

    def match_loadable(
        self, request: Request, cached: Prefix, has: Callable[[BlockHash], bool], longest: int | None = None
    ) -> LoadablePrefix | None:
        """Return the longest prefix that is cached in memory or in a source; None: it is no longer than in memory.

        Args:
            request: it has no blocks.
            cached: what `match` returns.
            has: whether the source has the block with a key.
            longest: tokens that the source has at most; None: any number.
        """
        tokens = request.max_cached_tokens if longest is None else min(request.max_cached_tokens, longest)
        if self._hasher is None or tokens <= 0:
            return None

        def is_cached(key: BlockHash) -> bool:
            return self._pool.has(key) or has(key)

        size = self._pool.block_size
        hashes = request.block_hashes(size, self._hasher)[: tokens // size]
        count = len(hashes)
        for group in self._full:  # which have all blocks before
            ends = (index for index in range(cached.count, count) if not is_cached(group_key(hashes[index], group)))
            count = next(ends, count)
        while count > cached.count and (missing := self._missing(request, hashes, count, is_cached)) is not None:
            count = missing
        if count <= cached.count:
            return None
        firsts = [0] * self._count
        for group, window in self._windows:
            firsts[group] = self._first_seen(request, count * size, window)
        held, lacking = list[int](), list[LackingBlock]()
        for index in range(min(firsts), count):
            for group in range(self._count):
                if index >= firsts[group]:
                    key = group_key(hashes[index], group)
                    held += (blocks := self._pool.match([key]))
                    if not blocks:
                        lacking.append(LackingBlock(index, group, key))
        return LoadablePrefix(count, held, lacking)

    def keys_in_sight(self, request: Request, prefix: Prefix) -> list[BlockHash]:
        """Return the keys of the blocks of a prefix that are held, the first ones of the sequence first."""
        groups = list(enumerate(prefix.unseen))
        return [
            group_key(request.hashes[index], group)
            for index in range(prefix.count)
            for group, unseen in groups
            if index >= unseen
        ]

    def register(self, request: Request, lacking: Iterable[LackingBlock], blocks: Iterable[int]) -> None:
        """Register blocks that were read from a source for a request, and hold what they lacked."""
        assert self._hasher is not None
        size = self._pool.block_size
        hashes = request.block_hashes(size, self._hasher)
        for source, block in zip(lacking, blocks, strict=False):
            index = source.index
            extra = request.extra_keys(index * size, (index + 1) * size)
            if self._pool.cache_block(block, source.key):
                self._pool.fill(filled := FilledBlock(block, request, index, source.group, hashes, extra))
                self._pool.finish(filled, failed=False)

    def _missing(
        self, request: Request, hashes: list[BlockHash], count: int, has: Callable[[BlockHash], bool]
    ) -> int | None:
        """Return the last block that groups with windows lack to begin behind `count` blocks; None if they have all.

        `has`: whether the block with a key is cached.
        """
        end = count * self._pool.block_size
        firsts = [(group, self._first_seen(request, end, window)) for group, window in self._windows]
        # All groups at each block, so that a block is looked up once for each group however often this is called.
        for index in reversed(range(min((first for _, first in firsts), default=count), count)):
            if any(index >= first and not has(group_key(hashes[index], group)) for group, first in firsts):
                return index
        return None

    def _first_seen(self, request: Request, start: int, window: int) -> int:
        """Return the index of the first block that a request's tokens from position `start` on attend to."""
        return request.first_seen(start, window) // self._pool.block_size

    def missing(self, request: Request, end: int) -> int:
        """Return the number of blocks that a request in the batch lacks for its tokens up to `end`."""
        return (self._pool.blocks_for(end) - request.num_blocks) * self._count

    def missing_on_entry(self, prefix: Prefix, end: int) -> int:
        """Return the number of blocks that a request lacks to enter the batch and compute its tokens up to `end`."""
        return (self._pool.blocks_for(end) - prefix.count) * self._count

    def room(self, request: Request) -> int:
        """Return the most tokens that a request can have without preemption, whatever it may have otherwise."""
        if not self._count:
            return sys.maxsize
        return (request.num_blocks + self._pool.num_free // self._count) * self._pool.block_size

    def usage(self, running: int) -> tuple[int, int]:
        """Return how many blocks are used, and how many there are; see `count_blocks` for models without pages.

        `running`: sequences in the batch.
        """
        return (self._pool.num_used if self._count else running), self._pool.num_blocks

    def enter(self, request: Request, prefix: Prefix | None = None) -> None:
        """Let a request that enters the batch hold its cached prefix, if there is one."""
        prefix = prefix or self._prefix(request, 0, [])
        self._pool.acquire(prefix.held)
        request.tables, request.unseen, request.was_loaded = prefix.tables, prefix.unseen, False
        request.num_blocks = request.num_cached_blocks = prefix.count
        request.num_computed_tokens = prefix.count * self._pool.block_size
        request.in_batch = True

    def grow(self, request: Request, end: int) -> tuple[int, ...]:
        """Allocate blocks for the tokens of a request up to `end`.

        Returns:
            The new blocks, those of the first group first, as many of each.
        """
        count = self._pool.blocks_for(end) - request.num_blocks
        if count <= 0:  # blocks may be left over from a rejected draft
            return ()
        fresh = self._pool.allocate(count * self._count)
        for group, table in enumerate(request.tables):
            table += fresh[group * count : (group + 1) * count]
        request.num_blocks += count
        return tuple(fresh)

    def drop_unseen(self, request: Request) -> None:
        """Give back the blocks that no further token of a request attends to."""
        start = max(0, request.num_computed_tokens - self._groups.kept_blocks * self._pool.block_size)
        for group, window in self._windows:
            first, unseen = self._first_seen(request, start, window), request.unseen[group]
            if first > unseen:
                self._pool.release(request.tables[group][unseen:first])
                request.unseen[group] = first

    def leave(self, request: Request) -> None:
        """Give back all blocks of a request."""
        for table, unseen in zip(request.tables, request.unseen, strict=True):
            self._pool.release(table[unseen:])
        request.tables, request.unseen = [], []
        request.num_blocks, request.in_batch = 0, False

    def cache_full_blocks(self, request: Request, end: int) -> None:
        """Register the blocks that a step fills, which computes a request's tokens up to `end`.

        Already now, before the step runs: it writes the keys and values of all its tokens before any of its queries
        reads them, so a sequence that enters in the same step may share the blocks.
        """
        full = end // self._pool.block_size
        if self._hasher is None or full <= request.num_cached_blocks:
            return
        size, is_observed = self._pool.block_size, self._pool.is_observed
        hashes = request.block_hashes(size, self._hasher)
        for index in range(request.num_cached_blocks, full):
            extra = request.extra_keys(index * size, (index + 1) * size) if is_observed else ()
            for group, table in enumerate(request.tables):
                if self._pool.cache_block(table[index], group_key(hashes[index], group)):
                    self._filled.append(filled := FilledBlock(table[index], request, index, group, hashes, extra))
                    self._pool.fill(filled)
        request.num_cached_blocks = full

    def take_filled(self) -> list[FilledBlock]:
        """Return the blocks that were registered since the last call: those that a step fills."""
        filled, self._filled = self._filled, []
        return filled

    def finish(self, filled: Iterable[FilledBlock], failed: Collection[str]) -> None:
        """Note that the step has ended that fills some blocks. `failed`: ids of requests that it failed for."""
        for block in filled:
            self._pool.finish(block, failed=block.request.id in failed)

    def evict(self, request: Request, start: int) -> None:
        """Let other requests not find the blocks of a request from position `start` on, also those given back."""
        first = start // self._pool.block_size
        if self._snapshots is not None:
            self._snapshots.evict(request, start)
        for group, (table, unseen) in enumerate(zip(request.tables, request.unseen, strict=True)):
            self._pool.evict_blocks(table[max(first, unseen) :])
            for key in _keys(request.hashes[first:unseen], group):
                self._pool.evict_blocks(self._pool.match([key]))

    def record(self, request: Request, hit: int, stats: StepStats, *, has_tier: bool) -> None:
        """Count the tokens that a request has found, when it enters the batch for the first time.

        `has_tier`: those that were not in memory were looked up in a tier. Where something was loaded, they were in any
        case.
        """
        if request.cached_tokens is None:
            request.cached_tokens = hit
            in_memory = hit if request.found_in_memory is None else min(hit, request.found_in_memory)
            request.loaded_tokens = hit - in_memory
            if self._hasher is not None:
                stats.prefix_queries += len(request.tokens)
                stats.prefix_hits += in_memory
            if has_tier or request.found_in_memory is not None:
                stats.external_queries += len(request.tokens) - in_memory
                stats.external_hits += request.loaded_tokens
            if request.loaded_tokens:
                hits = stats.hits_by_source
                hits[request.loaded_from] = hits.get(request.loaded_from, 0) + request.loaded_tokens

    def check(self, requests: Iterable[Request], running: Collection[str], others: Iterable[list[int]] = ()) -> None:
        """Assert that requests hold the blocks that they need, and those in the pool.

        Args:
            requests: all that have not finished.
            running: ids of those in the batch.
            others: blocks that are held beside those of block tables.
        """
        holders, size = list(others), self._pool.block_size
        for request in requests:
            assert request.in_batch == (request.id in running), "only requests in the batch hold blocks"
            assert request.num_computed_tokens <= request.num_blocks * size, "computed tokens without a block"
            if not request.in_batch:
                continue
            assert all(len(table) == request.num_blocks for table in request.tables), "block tables differ in length"
            for group, window in self._windows:
                first = self._first_seen(request, request.num_computed_tokens, window)
                assert request.unseen[group] <= first, "a block in sight was given back"
            holders += [table[unseen:] for table, unseen in zip(request.tables, request.unseen, strict=True)]
        self._pool.check(holders)


def _keys(hashes: list[BlockHash], group: int) -> Iterable[BlockHash]:
    return (group_key(key, group) for key in hashes) if group else hashes

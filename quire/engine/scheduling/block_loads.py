"""BlockLoads: requests whose prefixes a source has, and the blocks that they are read into."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.protocol import LoadSource
from quire.engine.scheduling.block_source import BlockSource, RemoteLoading
from quire.engine.scheduling.block_tables import BlockTables, LoadablePrefix, Prefix
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.request import BlockHash, Request
from quire.engine.scheduling.tier_blocks import BlockTier, LoadRule

_TOUCHED, _TOUCH_AGAIN_AFTER = 1024, 60.0  # prefixes whose use is remembered, and for how many seconds
# Whether a request waits for blocks, is computed with what is in memory, or stays in the queue until there is room.
Beginning = Literal["waits", "computes", "has no room"]


@dataclass(slots=True, eq=False)
class _Load:
    """A request that waits for blocks.

    Attributes:
        prefix: what it found, and lacks.
        place: where they are; the slowest place, if they are in several.
        blocks: the pool's blocks that the lacking ones are read into.
        received: how many of them were.
        is_over: no more will come.
        error: why the rest did not; empty: all have come, or it is not known.
    """

    request: Request
    prefix: LoadablePrefix
    blocks: list[int]
    source: BlockSource
    began: float
    deadline: float
    place: LoadSource
    received: int = 0
    is_over: bool = False
    error: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether the source is another engine."""
        return self.place == "p2p"


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A request that does not wait any more. What was read for it is in the prefix cache.

    Attributes:
        seconds: for which it has waited.
        blocks: that were read.
        is_remote: from another engine, or were to be.
        failure: why not all of another engine's blocks were read; None: they were, or came from a tier.
    """

    request: Request
    seconds: float
    blocks: int
    is_remote: bool = False
    failure: str | None = None


class BlockLoads:
    """Hold the blocks of requests that wait for a tier or another engine. They are in no queue; others run meanwhile.

    What was read is registered in the prefix cache when a load ends, and its request goes back to the queue: it finds
    the blocks there like any others.
    """

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        tier: BlockTier | None = None,
        rule: LoadRule | None = None,
        remote: RemoteLoading | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make loads, of which there are none.

        Args:
            pool: has the blocks.
            tables: find prefixes.
            tier: has blocks that are not in memory; None: there is none.
            rule: when they are loaded; given with a tier.
            remote: how blocks of other engines are read; None: they are not.
            clock: monotonic seconds.
        """
        self._tier = tier
        self.rule = rule
        self._remote = remote
        self._pool = pool
        self._tables = tables
        self._clock = clock
        self._serials = itertools.count()
        self._loads: dict[int, _Load] = {}
        self._touched: OrderedDict[BlockHash, float] = OrderedDict()  # the last key of prefixes, and when

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._loads)

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait."""
        return (load.request for load in self._loads.values())

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier."""
        return self._tier is not None

    @property
    def recomputes(self) -> bool:
        """Whether a request is computed if blocks of another engine cannot be read; else it fails."""
        return self._remote is not None and self._remote.recomputes

    def begin(self, request: Request, cached: Prefix) -> Beginning:
        """Begin to load what a request lacks, if another engine has it or that is faster than to compute it.

        `cached`: what it finds in memory.
        """
        if request.remote is not None:
            return self._begin_remote(request, request.remote, cached)
        return "waits" if self._begin_from_tier(request, cached) else "computes"

    def _begin_remote(self, request: Request, remote: RemoteBlocks, cached: Prefix) -> Beginning:
        assert self._remote is not None, "the core refuses such requests"
        source = self._remote.sources.source(remote)
        prefix = self._tables.match_loadable(request, cached, source.has, remote.num_tokens)
        if prefix is None or not prefix.lacking:
            self.release_unread(request)
            return "computes"
        if not self._pool.can_take(prefix.held, len(prefix.lacking)):
            return "has no room"
        request.remote = None
        self._begin(request, prefix, cached, source, self._remote.timeout, "p2p")
        return "waits"

    def _begin_from_tier(self, request: Request, cached: Prefix) -> bool:
        if self._tier is None or request.was_loaded:
            return False
        assert self.rule is not None
        prefix = self._tables.match_loadable(request, cached, self._tier.has)
        if prefix is None or not prefix.lacking:
            return False
        tokens = (prefix.count - cached.count) * self._pool.block_size
        if not self._pool.can_take(prefix.held, len(prefix.lacking)):
            return False
        place = self._tier.slowest([lacking.key for lacking in prefix.lacking])
        if not self.rule.loads(len(prefix.lacking), tokens, place):
            return False
        self._begin(request, prefix, cached, self._tier, self.rule.patience(tokens), place)
        return True

    def _begin(
        self,
        request: Request,
        prefix: LoadablePrefix,
        cached: Prefix,
        source: BlockSource,
        seconds: float,
        place: LoadSource,
    ) -> None:
        request.was_loaded, request.found_in_memory = True, cached.count * self._pool.block_size
        request.loaded_from = place
        self._pool.acquire(prefix.held)
        now, serial = self._clock(), next(self._serials)
        blocks = self._pool.allocate(len(prefix.lacking))
        self._loads[serial] = _Load(request, prefix, blocks, source, now, now + seconds, place)
        source.load(serial, [lacking.key for lacking in prefix.lacking])

    def release_unread(self, request: Request) -> None:
        """Let another engine not keep blocks for a request that does not read them."""
        if request.remote is not None and self._remote is not None:
            self._remote.sources.release(request.remote)
            request.remote = None

    def touch(self, request: Request, prefix: Prefix) -> None:
        """Let the tier keep what a request has found in memory: it is not read from there, but used."""
        if self._tier is None:
            return
        keys = self._tables.keys_in_sight(request, prefix)
        now = self._clock()
        if not keys or now - self._touched.get(keys[-1], -_TOUCH_AGAIN_AFTER) < _TOUCH_AGAIN_AFTER:
            return
        self._touched[keys[-1]] = now
        self._touched.move_to_end(keys[-1])
        if len(self._touched) > _TOUCHED:
            self._touched.popitem(last=False)
        self._tier.touch([key for key in reversed(keys) if self._tier.has(key)])

    def block(self, serial: int, index: int) -> int | None:
        """Return the block that a block of a load is read into; None: nobody waits for it any more."""
        load = self._loads.get(serial)
        return None if load is None else load.blocks[index]

    def received(self, serial: int, index: int) -> None:
        """Note that a block holds what was read."""
        load = self._loads[serial]
        load.received = index + 1
        load.is_over = load.received == len(load.blocks)

    def failed(self, serial: int, error: str = "") -> None:
        """Note that the source has no more blocks of a load. `error`: why."""
        if (load := self._loads.get(serial)) is not None:
            load.is_over, load.error = True, error

    def take_ended(self) -> list[EndedLoad]:
        """Return the requests that do not wait any more."""
        now = self._clock()
        ended = [serial for serial, load in self._loads.items() if load.is_over or now > load.deadline]
        return [self._end(serial, now) for serial in ended]

    def abandon(self, request: Request) -> None:
        """Let a request not wait any more, if it does, and another engine keep nothing for it."""
        self.release_unread(request)
        for serial, load in self._loads.items():
            if load.request is request:
                self._drop(serial)
                return

    def abandon_all(self) -> list[Request]:
        """Let no request wait; returns them. What was read for them is forgotten."""
        requests = [*self]
        for serial in [*self._loads]:
            self._drop(serial)
        return requests

    def check(self) -> None:
        """Assert that requests wait for blocks of their own."""
        for load in self._loads.values():
            assert not load.request.in_batch, "a request runs while it waits for blocks"
            assert len(load.blocks) == len(load.prefix.lacking), "blocks are read to nowhere"

    def held(self) -> list[list[int]]:
        """Return the blocks that are held."""
        return [blocks for load in self._loads.values() for blocks in (load.prefix.held, load.blocks)]

    def _end(self, serial: int, now: float) -> EndedLoad:
        load, seconds = self._loads[serial], now - self._loads[serial].began
        failure = None
        if load.is_remote:
            if load.received < len(load.blocks):
                failure = load.error or f"they did not arrive within {load.deadline - load.began:g} s (load_timeout)"
        elif self.rule is not None:
            if load.is_over:
                self.rule.loaded(load.received, seconds, load.place)
            else:
                self.rule.given_up(load.received, seconds, load.place)
        self._tables.register(load.request, load.prefix.lacking[: load.received], load.blocks)
        self._drop(serial)
        return EndedLoad(load.request, seconds, load.received, load.is_remote, failure)

    def _drop(self, serial: int) -> None:
        load = self._loads.pop(serial)
        if not load.is_over:
            load.source.cancel(serial)
        self._pool.release([*load.prefix.held, *load.blocks])

"""TierLoads: requests whose cached prefixes a tier has, and the blocks that they are read into."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.engine.scheduling.block_tables import BlockTables, Prefix, TierPrefix
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.request import BlockHash, Request
from quire.engine.scheduling.tier_blocks import BlockTier, LoadRule

_TOUCHED, _TOUCH_AGAIN_AFTER = 1024, 60.0  # prefixes whose use is remembered, and for how many seconds


@dataclass(slots=True, eq=False)
class _Load:
    """A request that waits for blocks.

    Attributes:
        prefix: what it found, and lacks.
        blocks: the pool's blocks that the lacking ones are read into.
        received: how many of them were.
        is_over: no more will come.
    """

    request: Request
    prefix: TierPrefix
    blocks: list[int]
    began: float
    deadline: float
    received: int = 0
    is_over: bool = False


class TierLoads:
    """Hold the blocks of requests that wait for a tier. Those requests are in no queue; others run meanwhile.

    What was read is registered in the prefix cache when a load ends, and its request goes back to the queue: it finds
    the blocks there like any others.
    """

    def __init__(
        self,
        tier: BlockTier,
        rule: LoadRule,
        pool: BlockPool,
        tables: BlockTables,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self.rule = rule
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

    def begin(self, request: Request, cached: Prefix) -> bool:
        """Begin to load what a request lacks, if that is faster than to compute it; returns whether it waits now.

        `cached`: what it finds in memory.
        """
        if request.was_loaded:
            return False
        prefix = self._tables.match_tier(request, cached, self._tier.has)
        if prefix is None or not prefix.lacking:
            return False
        tokens = (prefix.count - cached.count) * self._pool.block_size
        if not self._pool.can_take(prefix.held, len(prefix.lacking)):
            return False
        if not self.rule.loads(len(prefix.lacking), tokens):
            return False
        request.was_loaded, request.found_in_memory = True, cached.count * self._pool.block_size
        self._pool.acquire(prefix.held)
        now, serial = self._clock(), next(self._serials)
        blocks = self._pool.allocate(len(prefix.lacking))
        self._loads[serial] = _Load(request, prefix, blocks, now, now + self.rule.patience(tokens))
        self._tier.load(serial, [lacking.key for lacking in prefix.lacking])
        return True

    def touch(self, request: Request, prefix: Prefix) -> None:
        """Let the tier keep what a request has found in memory: it is not read from there, but used."""
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

    def failed(self, serial: int) -> None:
        """Note that the tier has no more blocks of a load."""
        if (load := self._loads.get(serial)) is not None:
            load.is_over = True

    def take_ended(self) -> list[Request]:
        """Return the requests that do not wait any more. What was read for them is in the prefix cache."""
        now = self._clock()
        ended = [serial for serial, load in self._loads.items() if load.is_over or now > load.deadline]
        return [self._end(serial, now) for serial in ended]

    def abandon(self, request: Request) -> None:
        """Let a request not wait any more, if it does."""
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
            assert not load.request.in_batch, "a request runs while it waits for a tier"
            assert len(load.blocks) == len(load.prefix.lacking), "blocks are read to nowhere"

    def held(self) -> list[list[int]]:
        """Return the blocks that are held."""
        return [blocks for load in self._loads.values() for blocks in (load.prefix.held, load.blocks)]

    def _end(self, serial: int, now: float) -> Request:
        load = self._loads[serial]
        if load.is_over:
            self.rule.loaded(load.received, now - load.began)
        else:
            self.rule.given_up(load.received, now - load.began)
        self._tables.register(load.request, load.prefix.lacking[: load.received], load.blocks)
        self._drop(serial)
        return load.request

    def _drop(self, serial: int) -> None:
        load = self._loads.pop(serial)
        if not load.is_over:
            self._tier.cancel(serial)
        self._pool.release([*load.prefix.held, *load.blocks])

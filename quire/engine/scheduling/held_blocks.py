"""HeldBlocks: the blocks of prompts that a prefiller keeps until a decoder has read them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.request import BlockHash, Request
from quire.engine.scheduling.tier_blocks import group_key


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How much is kept, and for how long.

    Attributes:
        share: of the blocks of the pool.
        seconds: after which blocks are given back that nobody has read.
    """

    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where decoders read the blocks of this engine, and its name."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    blocks: dict[BlockHash, int]
    flow: str
    expires_at: float  # monotonic seconds


class HeldBlocks:
    """Hold references to blocks of requests that have ended, for a time and up to a share of the pool.

    Where there is no room, the oldest of the flow that has most gives way.
    """

    def __init__(
        self, pool: BlockPool, address: EngineAddress, limits: HoldLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._address = address
        self._limits = limits
        self._most = int(pool.num_blocks * limits.share)
        self._clock = clock
        self._holds: dict[str, _Hold] = {}  # the oldest first
        self._count_of: defaultdict[str, int] = defaultdict(int)  # blocks of each flow
        self._expired = 0

    def __len__(self) -> int:
        """Return the number of prompts whose blocks are held."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """The number of references that are held."""
        return sum(self._count_of.values())

    @property
    def next_expiry(self) -> float:
        """Monotonic seconds when the next blocks are given back, of which there are some."""
        return next(iter(self._holds.values())).expires_at

    def hold(self, request: Request) -> RemoteBlocks | None:
        """Hold the whole blocks of a request's prompt, which leaves the batch afterwards.

        Returns:
            What a decoder needs to know; None: they cannot be held, as they are too many or nobody would find them.
        """
        if not request.in_batch or not request.is_shared:
            return None
        blocks = {
            group_key(request.hashes[index], group): table[index]
            for group, (table, unseen) in enumerate(zip(request.tables, request.unseen, strict=True))
            for index in range(unseen, request.prompt_len // self._pool.block_size)
        }
        if len(blocks) > self._most:
            return None
        while self.num_blocks + len(blocks) > self._most:
            self._end_oldest_of_greediest()
        if blocks:
            self._pool.acquire(blocks.values())
            self._holds[request.id] = _Hold(blocks, request.flow, self._clock() + self._limits.seconds)
            self._count_of[request.flow] += len(blocks)
        return RemoteBlocks(
            engine_id=self._address.engine_id,
            host=self._address.host,
            port=self._address.port,
            request_id=request.id,
            num_tokens=request.prompt_len,
            block_ids=[*blocks.values()],
            expires_at=time.time() + self._limits.seconds,
        )

    def find(self, request_id: str, key: BlockHash) -> int | None:
        """Return the block with a key that is held for a request, or cached; None: there is none."""
        hold = self._holds.get(request_id)
        block = None if hold is None else hold.blocks.get(key)
        return self._pool.computed(key) if block is None else block

    def end(self, request_id: str) -> None:
        """Give back the blocks of a request, if they are held."""
        if (hold := self._holds.pop(request_id, None)) is not None:
            self._count_of[hold.flow] -= len(hold.blocks)
            if not self._count_of[hold.flow]:
                del self._count_of[hold.flow]
            self._pool.release([*hold.blocks.values()])

    def end_one(self) -> bool:
        """Give back some blocks before they were read, as there is no other room; returns whether there were any."""
        if not self._holds:
            return False
        self._end_oldest_of_greediest()
        return True

    def expire(self) -> None:
        """Give back what nobody has read in time."""
        now = self._clock()
        for request_id in [name for name, hold in self._holds.items() if hold.expires_at <= now]:
            self.end(request_id)
            self._expired += 1

    def clear(self) -> None:
        """Give back all blocks: what they hold is not valid any more."""
        self._expired += len(self._holds)
        for request_id in [*self._holds]:
            self.end(request_id)

    def take_expired(self) -> int:
        """Return how many prompts were given back before they were read, since the last call."""
        expired, self._expired = self._expired, 0
        return expired

    def held(self) -> list[list[int]]:
        """Return the blocks that are held."""
        return [[*hold.blocks.values()] for hold in self._holds.values()]

    def check(self) -> None:
        """Assert that the counts are those of what is held."""
        counts: defaultdict[str, int] = defaultdict(int)
        for hold in self._holds.values():
            counts[hold.flow] += len(hold.blocks)
        assert counts == self._count_of, "counts of held blocks differ"
        assert self.num_blocks <= self._most, "more blocks are held than may be"

    def _end_oldest_of_greediest(self) -> None:
        greediest = max(self._count_of, key=self._count_of.__getitem__)
        self.end(next(request_id for request_id, hold in self._holds.items() if hold.flow == greediest))
        self._expired += 1

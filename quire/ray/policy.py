"""Which replica gets a request: the one that has least to compute until the request has its first token.

Everything is counted in blocks of a prompt: KV blocks, or pieces of its text where tokens are not known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Replica = TypeVar("Replica")


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do.

    Attributes:
        queued: blocks of prompts that are not computed yet.
        requests: requests that have not ended.
        given: blocks that it was given to compute so far, ever.
    """

    queued: float = 0.0
    requests: int = 0
    given: int = 0


Number = TypeVar("Number", float, "NDArray[np.float64]")  # of one replica, or an array of all of them


def cost(new: Number, queued: Number, requests: Number, request_cost: float) -> Number:
    """Return the blocks that a replica would compute before the first token of a request, and for others meanwhile.

    Args:
        new: blocks of the request's prompt that the replica does not hold.
        queued: blocks of other prompts that it has not computed yet.
        requests: requests that have not ended there.
        request_cost: blocks that it could compute instead in the time that it gives to one running request.
    """
    return new + queued + request_cost * requests


def ranked(
    blocks: int, cached: Mapping[Replica, int], loads: Mapping[Replica, Load], request_cost: float
) -> list[Replica]:
    """Return the replicas in the order in which they should get a request.

    Among equals the one with fewer requests comes first, then the one that was given fewer blocks: of idle replicas
    not always the same one, whose cache would be full while those of others are empty.

    Args:
        blocks: number of blocks of the request's prompt.
        cached: those that each replica holds.
        loads: what each replica has to do.
        request_cost: see `cost`.
    """

    def key(replica: Replica) -> tuple[float, int, int]:
        load = loads[replica]
        new = float(blocks - cached.get(replica, 0))
        return cost(new, load.queued, float(load.requests), request_cost), load.requests, load.given

    return sorted(loads, key=key)


class HeldBlocks:
    """Blocks that a replica is believed to hold, with the bound and the order of eviction of its own cache."""

    def __init__(self, capacity: int) -> None:
        """Make an empty one. `capacity`: blocks that the replica can hold."""
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def leading(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are held."""
        blocks = self._blocks
        for index, block in enumerate(hashes):
            if block not in blocks:
                return index
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Note that a prompt's blocks are held and used now; return what had to be evicted for them.

        Of a prompt, the last blocks are evicted first.
        """
        blocks = self._blocks
        for block in reversed(hashes[: self.capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        return self._evict()

    def note(self, hashes: Iterable[int]) -> None:
        """Note that blocks are held, as the replica says; those that are known keep their place."""
        for block in hashes:
            self._blocks.setdefault(block, None)
        self._evict()

    def recent(self, count: int) -> list[int]:
        """Return the blocks that were used last, the newest first."""
        return list(islice(reversed(self._blocks), count))

    def _evict(self) -> list[int]:
        blocks = self._blocks
        return [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.capacity)]

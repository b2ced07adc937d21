"""The order in which replicas should get a request, of what a router without tokens knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from quire.engine.client.replicas.dispatch import dispatch_cost

Replica = TypeVar("Replica")


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do.

    Attributes:
        requests: requests that have not ended.
        given: pieces of prompts that it was given to compute so far, ever.
    """

    requests: int = 0
    given: int = 0


def ranked(
    pieces: int, held: Mapping[Replica, int], loads: Mapping[Replica, Load], request_cost: float
) -> list[Replica]:
    """Return the replicas in the order in which they should get a request.

    Among equals the one with fewer requests comes first, then the one that was given fewer pieces: of idle replicas
    not always the same one, whose cache would be full while those of others are empty.

    Args:
        pieces: number of pieces of the request's prompt.
        held: those that each replica holds.
        loads: what each replica has to do.
        request_cost: pieces that count as much as what a running request has left to compute.
    """

    def key(replica: Replica) -> tuple[float, int, int]:
        load = loads[replica]
        new = float(pieces - held.get(replica, 0))
        return dispatch_cost(request_cost * load.requests, new), load.requests, load.given

    return sorted(loads, key=key)

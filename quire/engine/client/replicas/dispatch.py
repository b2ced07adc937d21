"""The cost by which a request is dispatched: the replica with the lowest gets it.

It is the policy of several replicas in one server, of the router on Ray, and of the simulation (benchmarks/routing.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Number = TypeVar("Number", float, "NDArray[np.float64]")  # of one replica, or an array of all of them
_NEW = 2.0  # weight of tokens that a request adds: they delay it, and those that come after it


def dispatch_cost(load: Number, new: Number) -> Number:
    """Return the cost of a request on a replica, in its unit: tokens, or blocks.

    Args:
        load: what the replica has yet to compute for others, of prompts and answers.
        new: what it does not hold of the request's prompt.
    """
    return load + _NEW * new

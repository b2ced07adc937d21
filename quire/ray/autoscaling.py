"""An autoscaling policy by what engines have to do: the sequences that wait or run in them.

Ray's own policy counts HTTP requests: among them idle sessions of WebSockets, and a request with 100 prompts as one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

RUNNING, WAITING = "quire_running", "quire_waiting"  # metrics that replicas report


def by_sequences(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for `target_ongoing_requests` sequences in each, as a policy of Ray Serve.

    What still waits in front of the replicas counts as well. Ray applies the bounds, factors and delays of the config.
    """
    target = context.config.target_ongoing_requests
    metrics = context.aggregated_metrics or {}
    sequences = sum(sum(metrics.get(name, {}).values()) for name in (RUNNING, WAITING))
    queued = context.total_queued_requests or 0.0
    wanted = math.ceil((sequences + queued) / target)
    bounds = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, bounds[0]), bounds[1]), {}

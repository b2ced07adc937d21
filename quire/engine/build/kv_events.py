"""Builds the publisher of the prefix cache's events, and what records them."""

from __future__ import annotations

from quire.config.options import EngineOptions
from quire.engine.build.cache import CachePlan
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.engine.kv_events.recorder import EventRecorder
from quire.engine.models.specs.cache import CacheGroup, LatentCache


def event_publisher(options: EngineOptions, plan: CachePlan, rank: int) -> KVEventPublisher | None:
    """The publisher that --kv-events-config asks for; None: it does not, or the model has no prefix cache.

    `rank`: number of the replica, by which its ports are higher.

    Raises:
        EndpointUnavailable: one of its sockets cannot be bound.
    """
    has_prefix_cache = options.enable_prefix_caching and not plan.groups.has_states
    return KVEventPublisher(options.kv_events, rank) if options.kv_events.publishes and has_prefix_cache else None


def event_recorder(publisher: KVEventPublisher, plan: CachePlan, rank: int) -> EventRecorder:
    """What records the events of the groups of layers."""
    groups = [(_kind(group), group.window) for group in plan.layout.growing]
    return EventRecorder(publisher.publish, groups, rank=rank)


def _kind(group: CacheGroup) -> str:
    """How layers attend, by vLLM's names."""
    if group.window is not None:
        return "sliding_window"
    return "mla_attention" if isinstance(group.kind, LatentCache) else "full_attention"

"""A request router for Ray Serve that prefers the replica that holds the beginning of a prompt."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.engine.client.replicas.prefix_index import PrefixIndex
from quire.ray.policy import Load, ranked
from quire.ray.prefixes import unpacked
from quire.ray.proxy import PREFIX

_UNKNOWN_CAPACITY = 1 << 14  # pieces, before a replica has said its own
CAPACITY, RECENT = "quire_prefix_capacity", "quire_prefixes"  # routing statistics of replicas


class PrefixRouter(RequestRouter):
    """Route to the replica with the least to compute: by the policy of `quire.ray.policy`.

    A router knows what it has sent where, and learns from the routing statistics of replicas what other proxies have.
    Of requests without a prompt, such as files and WebSockets, it knows the load only.
    """

    def initialize_state(self, request_cost: float = 4.0) -> None:
        """Take the settings of the config (`request_router_kwargs`).

        `request_cost`: pieces of 256 bytes of a prompt that count as much as a running request.
        """
        self._request_cost = float(request_cost)
        self._held: dict[ReplicaID, PrefixIndex] = {}
        self._given: dict[ReplicaID, int] = {}  # pieces
        self._reported: dict[ReplicaID, bytes] = {}
        self._ongoing: dict[str, ReplicaID] = {}  # by the internal ids of requests
        self._counts: Counter[ReplicaID] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of replicas that were added, removed, or have new statistics."""
        super().update_replicas(replicas)
        present = {replica.replica_id for replica in replicas}
        self._held = {known: self._held.get(known, PrefixIndex(_UNKNOWN_CAPACITY)) for known in present}
        # What is new must not get all that others were given before it came.
        least = min((given for known, given in self._given.items() if known in present), default=0)
        self._given = {known: self._given.get(known, least) for known in present}
        self._reported = {known: report for known, report in self._reported.items() if known in present}
        self._ongoing = {request: replica for request, replica in self._ongoing.items() if replica in present}
        self._counts = Counter(self._ongoing.values())
        for replica in replicas:
            self._take_report(replica.replica_id, replica.routing_stats)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they should be tried."""
        hashes: Sequence[int] = ()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            hashes = self._prefix_of(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas if replica.replica_id in self._held}
        held = {known: self._held[known].matched(hashes) for known in by_id}
        loads = {known: Load(requests=self._counts[known], given=self._given[known]) for known in by_id}
        order = ranked(len(hashes), held, loads, self._request_cost)
        if pending_request is not None and order:
            self._expect(pending_request, order[0], hashes)
        return [[by_id[replica]] for replica in order]

    def _expect(self, pending: PendingRequest, replica_id: ReplicaID, hashes: Sequence[int]) -> None:
        """Count a request for a replica at once: others that arrive with it are routed before Ray has sent it."""
        request = pending.metadata.internal_request_id
        self._begin(request, replica_id, hashes)

        def settle(chosen: asyncio.Future[RunningReplica]) -> None:
            if chosen.cancelled() or chosen.exception() is not None:
                self._end(request)
            elif chosen.result().replica_id != self._ongoing.get(request, replica_id):
                self._begin(request, chosen.result().replica_id, hashes)

        pending.future.add_done_callback(settle)

    def _begin(self, request: str, replica_id: ReplicaID, hashes: Sequence[int]) -> None:
        self._end(request)
        held = self._held.get(replica_id)
        if held is None:
            return
        self._ongoing[request] = replica_id
        self._counts[replica_id] += 1
        self._given[replica_id] += len(hashes) - held.matched(hashes)
        held.add(hashes)

    def _end(self, request: str) -> None:
        replica_id = self._ongoing.pop(request, None)
        if replica_id is not None:
            self._counts[replica_id] -= 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has one request less."""
        self._end(internal_request_id)

    def _take_report(self, replica_id: ReplicaID, stats: dict[str, Any]) -> None:
        report = stats.get(RECENT)
        if report is None or report == self._reported.get(replica_id):
            return
        self._reported[replica_id] = report
        held = self._held[replica_id]
        held.resize(stats[CAPACITY])
        held.note(unpacked(report))

    def _prefix_of(self, pending_request: PendingRequest) -> Sequence[int]:
        """The hashes that the proxy's middleware has put into the scope of an HTTP request."""
        argument = pending_request.args[0] if pending_request.args else None
        if not isinstance(argument, bytes):
            return ()
        scope = pickle.loads(argument).asgi_scope  # noqa: S301 this process has pickled it
        if PREFIX in scope:
            return unpacked(scope[PREFIX])
        return ()

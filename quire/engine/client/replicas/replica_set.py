"""ReplicaSet: several engines of one model as one engine. A request goes to where it makes the least new work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from functools import partial
from typing import NoReturn

from typing_extensions import override

from quire.engine.client.batch import BatchItem, OnResult, PooledBatch, open_batch
from quire.engine.client.commands import Commands
from quire.engine.client.deadline import Deadline
from quire.engine.client.engine import NO_DEADLINE
from quire.engine.client.errors import EngineDead, EngineError
from quire.engine.client.model_info import KVEventSource, ModelInfo
from quire.engine.client.origin import check_rank, current_origin
from quire.engine.client.protocol import EngineState, MediaItem, StepStats, TokenArray
from quire.engine.client.records import Observers
from quire.engine.client.replicas.dispatch import dispatch_cost
from quire.engine.client.replicas.load import AnswerLength, Work
from quire.engine.client.replicas.operation import Operations, ReplicaCommands, ReplicaSleeping
from quire.engine.client.replicas.prefix_index import PromptKeys
from quire.engine.client.replicas.replica import Replica
from quire.engine.client.sleep import Sleeping
from quire.engine.client.slots import Slots, SlottedEngine
from quire.engine.client.stream import Delta, EngineRequest, GenerateRequest, Pooled, PoolRequest


class ReplicaSet(SlottedEngine):
    """The replicas of a model. Belongs to one event loop.

    The front end knows of each replica which prompts it has got, and how many tokens of its requests are not computed.
    A request goes to the replica where the tokens that have to be computed, its own and those before it, are fewest.
    Where several are equal they take turns. What extends a request goes where that is.

    A request is never sent to a second replica: one that makes its replica die would end them all.
    """

    def __init__(self, slots: Slots, *, has_prefix_cache: bool, operations: Operations | None = None) -> None:
        """Begin without replicas.

        Args:
            slots: of one replica's sequences; it grows with each.
            has_prefix_cache: the engines have one.
            operations: that several front ends count together; None: this one is alone.
        """
        self.observers = Observers()
        self._slots = slots
        self._slots_of_each = slots.capacity
        self._has_prefix_cache = has_prefix_cache
        self._keys = PromptKeys()
        self._replicas: list[Replica] = []
        self._turn = 0
        self._answers = AnswerLength()
        self._open: dict[str, tuple[Replica, Work]] = {}  # requests whose prompts may be extended
        self._items: dict[str, tuple[Replica, Work]] = {}  # requests of batches
        self._operations = operations or Operations()
        self._replica_sleeping = ReplicaSleeping(self, self._operations)
        self.sleeping: Sleeping = self._replica_sleeping
        self._replica_commands = ReplicaCommands(self, self._operations)
        self.commands: Commands = self._replica_commands

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, by rank."""
        return self._replicas

    def add(self, replica: Replica) -> None:
        """Add a replica, whose core may still be loading. It gets no requests before it has entered."""
        self._replicas.append(replica)
        replica.client.on_state = partial(self._learn, replica)
        replica.client.observers.add(self.observers)
        self._count_slots()

    def _learn(self, replica: Replica, state: EngineState) -> None:
        """Take note of what another front end has made of a replica, as it does so with all."""
        if replica.has_entered:
            self._replica_sleeping.learned(state)
            self._replica_commands.learned(state)

    def describe(self, replica: Replica, info: ModelInfo) -> None:
        """Take note of the model that the core of a replica has loaded. What is asked of all is asked of it, too."""
        replica.describe(info, has_prefix_cache=self._has_prefix_cache)
        self._keys.block_size = info.block_size

    async def enter(self, replica: Replica, info: ModelInfo) -> None:
        """Let a replica get requests, whose core has been loaded: for the first time, or again.

        Raises:
            EngineDead: it has died meanwhile, or cannot become as the others are.
        """
        self.describe(replica, info)
        await self._operations.end()
        try:
            await self._replica_commands.catch_up(replica.client)
            await self._replica_sleeping.catch_up(replica.client)
        except EngineDead:
            raise
        except EngineError as error:
            reason = f"it cannot become as the other replicas are: {error}"
            replica.end(reason)
            raise EngineDead(reason) from error
        replica.has_entered = True

    def set_leaving(self, replicas: Sequence[Replica], *, is_leaving: bool) -> None:
        """Send no more requests to replicas that are to be removed, or do so again."""
        for replica in replicas:
            replica.is_leaving = is_leaving
        self._count_slots()

    def remove(self, replica: Replica) -> None:
        """Remove a replica, whose requests have ended or will fail."""
        self._replicas.remove(replica)
        self._count_slots()

    def _count_slots(self) -> None:
        count = sum(not replica.is_leaving for replica in self._replicas)
        self._slots.capacity = self._slots_of_each * max(1, count)

    def live(self) -> list[Replica]:
        """Return the replicas whose cores run.

        Raises:
            EngineDead: there is none.
        """
        live = [replica for replica in self._replicas if replica.is_live]
        if not live:
            raise self._death()
        return live

    @property
    @override
    def open_streams(self) -> int:
        return sum(replica.client.open_streams for replica in self._replicas)

    @property
    @override
    def kv_event_sources(self) -> dict[int, KVEventSource]:
        return {rank: source for replica in self._replicas for rank, source in replica.client.kv_event_sources.items()}

    @property
    @override
    def stats(self) -> StepStats:
        """The sums of the gauges of all replicas."""
        gauges = [replica.client.stats for replica in self._replicas if replica.is_live]
        return StepStats(
            running=sum(stats.running for stats in gauges),
            waiting=sum(stats.waiting for stats in gauges),
            blocks_used=sum(stats.blocks_used for stats in gauges),
            blocks_total=sum(stats.blocks_total for stats in gauges),
            deferred=sum(stats.deferred for stats in gauges),
        )

    @property
    @override
    def dead(self) -> EngineDead | None:
        """The error that ended the last replica; None while one runs."""
        return None if any(replica.is_live for replica in self._replicas) else self._death()

    def _death(self) -> EngineDead:
        deaths = [replica.client.dead for replica in self._replicas if replica.client.dead is not None]
        return deaths[0] if deaths else EngineDead("No replica of the model is ready yet.")

    @override
    def unresponsive_seconds(self) -> float:
        """Those of the replica that responds best."""
        return min((replica.client.unresponsive_seconds() for replica in self._replicas if replica.is_live), default=0)

    @override
    async def wait_until_dead(self) -> NoReturn:
        while (dead := self.dead) is None:
            with suppress(EngineDead):
                await self.live()[0].client.wait_until_dead()
        raise dead

    @override
    def fail(self, reason: str) -> None:
        for replica in self._replicas:
            replica.client.fail(reason)

    @override
    @contextmanager
    def slots(self, count: int, tenant: str = "") -> Iterator[None]:
        refusals = [replica.client.refusal_of_new for replica in self._ready()]
        if None not in refusals:
            raise refusals[0] or self._death()
        check_rank(current_origin(), range(self._replicas[0].rank, self._replicas[-1].rank + 1))
        with self._slots.held(count, tenant, self.stats, self.observers):
            yield

    @override
    async def generate(
        self, request: GenerateRequest, ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        replica, work = self._assign(request, self._answers.expected(request.params.max_tokens))
        if request.open and request.request_id is not None:
            self._open[request.request_id] = replica, work
        try:
            async with aclosing(replica.client.generate(request, work.end_and_tell(ended))) as deltas:
                async for delta in deltas:
                    work.advance(len(delta.token_ids))
                    if delta.finish_reason is not None:
                        self._answers.ended(work.generated)
                    yield delta
        finally:
            work.end()
            if request.request_id is not None:
                self._open.pop(request.request_id, None)

    @override
    def extend(
        self, request_id: str, tokens: TokenArray, *, last: bool = False, items: tuple[MediaItem, ...] = ()
    ) -> None:
        if request_id in self._open:
            replica, work = self._open[request_id]
            work.extend(len(tokens))
            replica.client.extend(request_id, tokens, last=last, items=items)
        elif (dead := self.dead) is not None:
            raise dead

    @override
    async def pool(self, request: PoolRequest) -> Pooled:
        replica, work = self._assign(request)
        try:
            return await replica.client.pool(request)
        finally:
            work.end()

    @override
    def pool_batch(
        self, *, deadline: Deadline = NO_DEADLINE, on_result: OnResult | None = None, tenant: str = ""
    ) -> AbstractContextManager[PooledBatch]:
        return open_batch(self, deadline, on_result, tenant)

    def start(self, items: Sequence[BatchItem]) -> None:
        """Send the requests of a batch; see `BatchClient`."""
        by_replica: defaultdict[Replica, list[BatchItem]] = defaultdict(list)
        for item in items:
            self._items[item.request_id] = assigned = self._assign(item.request)
            by_replica[assigned[0]].append(item)
        for replica, its_items in by_replica.items():
            replica.client.start(its_items)

    def finish(self, item: BatchItem) -> None:
        """Forget a request of a batch; see `BatchClient`."""
        replica, work = self._items.pop(item.request_id)
        work.end()
        replica.client.finish(item)

    def abort(self, items: Sequence[BatchItem]) -> None:
        """Abort requests of a batch, some of which may have got no replica; see `BatchClient`."""
        by_replica: defaultdict[Replica, list[BatchItem]] = defaultdict(list)
        for item in items:
            if item.request_id in self._items:
                replica, work = self._items.pop(item.request_id)
                work.end()
                by_replica[replica].append(item)
        for replica, its_items in by_replica.items():
            replica.client.abort(its_items)

    def _ready(self) -> list[Replica]:
        """The replicas that may get requests.

        Raises:
            EngineDead: there is none.
        """
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready:
            raise self._death()
        return ready

    def _assign(self, request: EngineRequest, answer: float = 0.0) -> tuple[Replica, Work]:
        """Choose the replica of a request, and count its work there. `answer`: tokens that it is expected to generate.

        Raises:
            EngineDead: no replica runs, or the one that the request asks for does not.
            EngineAsleep: all sleep.
        """
        candidates = self._candidates(request)
        keys = self._keys.of(request) if self._has_prefix_cache else []
        size, first = len(request.prompt), self._turn % len(candidates)
        self._turn += 1
        best, new_tokens = candidates[first], 0
        least = float("inf")
        for replica in (*candidates[first:], *candidates[:first]):
            matched = replica.prefixes.matched(keys) if replica.prefixes is not None else 0
            new = max(1, size - matched * self._keys.block_size)  # the last token is always computed
            cost = dispatch_cost(replica.load.tokens, float(new))
            if cost < least:
                best, new_tokens, least = replica, new, cost
        if best.prefixes is not None:
            best.prefixes.add(keys)
        return best, best.load.begin(new_tokens, answer)

    def _candidates(self, request: EngineRequest) -> list[Replica]:
        ready = self._ready()
        rank = request.origin.rank
        if rank is not None:
            ready = [replica for replica in ready if replica.rank == rank]
            if not ready:
                raise EngineDead(f"Replica {rank} of the model, which the request asks for, does not run now.")
        awake = [replica for replica in ready if replica.client.refusal is None]
        if not awake:
            raise ready[0].client.refusal or self._death()
        return [replica for replica in awake if replica.responds] or awake

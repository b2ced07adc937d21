"""The interface through which the front end uses an engine: the client of one core, or a set of replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from quire.engine.client.batch import OnResult, PooledBatch
from quire.engine.client.commands import Commands
from quire.engine.client.deadline import Deadline
from quire.engine.client.errors import EngineDead
from quire.engine.client.model_info import KVEventSource
from quire.engine.client.protocol import MediaItem, StepStats, TokenArray
from quire.engine.client.records import Observers
from quire.engine.client.sleep import Sleeping
from quire.engine.client.stream import Delta, GenerateRequest, Pooled, PoolRequest

NO_DEADLINE = Deadline()


class Engine(Protocol):
    """An engine. Its requests are sequences, each of which has a slot.

    Attributes:
        sleeping: puts it to sleep and wakes it.
        commands: does what an operator asks for.
        observers: get its events.
    """

    sleeping: Sleeping
    commands: Commands
    observers: Observers

    @property
    def capacity(self) -> int:
        """Number of sequences that may run or wait at the same time."""

    @property
    def largest_request(self) -> int:
        """Number of sequences that one request may have: more than one tenant may have are never admitted."""

    @property
    def slots_in_use(self) -> int:
        """Number of sequences that run, wait, or are being prepared."""

    @property
    def open_streams(self) -> int:
        """Number of sequences whose output is being read."""

    @property
    def kv_event_sources(self) -> dict[int, KVEventSource]:
        """Where the events of its prefix caches are published, by the rank of the core; empty: nowhere."""

    @property
    def stats(self) -> StepStats:
        """Statistics after the engine's last step."""

    @property
    def dead(self) -> EngineDead | None:
        """The error that ended the engine; None while it runs."""

    def unresponsive_seconds(self) -> float:
        """Seconds for which the engine has not responded although it should have; 0 if it responds."""

    async def wait_until_dead(self) -> NoReturn:
        """Wait until the engine has stopped.

        Raises:
            EngineDead: it has.
        """

    def fail(self, reason: str) -> None:
        """Mark the engine as dead and fail every open stream."""

    def slots(self, count: int, tenant: str = "") -> AbstractContextManager[None]:
        """Reserve slots for sequences of a tenant, before their prompts are prepared.

        Raises:
            EngineDead: the engine has stopped.
            EngineAsleep: it sleeps, or is about to.
            EngineOverloaded: there are too few free slots, or the tenant has its share.
            RequestRefused: the request asks for a replica that there is not.
        """

    def take_slot(self, tenant: str) -> bool:
        """Reserve a slot for one more sequence, if more than half of all are free, and the tenant may have more."""

    def release_slots(self, count: int, tenant: str) -> None:
        """Release slots of a tenant."""

    def generate(
        self, request: GenerateRequest, ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Generate one sequence; closing the generator early frees the request within an engine step.

        The caller has reserved a slot with `slots`: a stream that has begun must not fail because the queue is full.
        `ended` is called when the engine has freed the sequence; its last delta may not have been read yet.

        Raises:
            RequestFailed: the engine failed the request.
            EngineDead: the engine has stopped.
            DeadlineExceeded: the request's time has passed.
        """

    def extend(
        self, request_id: str, tokens: TokenArray, *, last: bool = False, items: tuple[MediaItem, ...] = ()
    ) -> None:
        """Append tokens to the prompt of an open request, which has begun.

        Args:
            request_id: id of its `GenerateRequest`.
            tokens: 1-D int32 token ids; may be empty.
            last: the prompt is complete.
            items: see `ExtendRequest`.

        Raises:
            EngineDead: the engine has stopped.
        """

    async def pool(self, request: PoolRequest) -> Pooled:
        """Pool the hidden states of one prompt; cancelling frees the request within an engine step.

        Raises:
            RequestFailed: the engine failed the request.
            EngineDead: the engine has stopped.
            DeadlineExceeded: the request's time has passed.
        """

    def pool_batch(
        self, *, deadline: Deadline = NO_DEADLINE, on_result: OnResult | None = None, tenant: str = ""
    ) -> AbstractContextManager[PooledBatch]:
        """A batch of pooling requests, which are aborted at the end if they still run.

        The caller has reserved one slot with `slots`. The batch takes further slots while half of all are free.

        Args:
            deadline: when the batch fails with `DeadlineExceeded`.
            on_result: from the index and array of a result to the array to keep; None: keep it as it is.
            tenant: holds the further slots.

        Raises:
            EngineDead: the engine has stopped.
        """

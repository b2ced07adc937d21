"""Many pooling requests that end together: sent a window at a time, and awaited as one."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
from typing_extensions import override

from quire.engine.client.deadline import Deadline
from quire.engine.client.errors import EngineError
from quire.engine.client.protocol import FinishReason, PooledArray, PooledOutput, RequestOutput
from quire.engine.client.records import RequestRecord
from quire.engine.client.stream import OutputStream, PoolRequest, error_of, pooled_record
from quire.workers.turns import ENDINGS, turns

# Enough for several steps of short texts. Each takes a slot of the engine: a larger window would leave others less.
_WINDOW = 128
# From a result and its index to the array to keep. An awaitable is awaited, and the result holds its slot until then.
OnResult = Callable[[int, PooledArray], PooledArray | Awaitable[PooledArray]]


class BatchClient(Protocol):
    """The interface of the client that a batch uses."""

    def take_slot(self, tenant: str) -> bool:
        """Reserve a slot for one more sequence, if more than half of all are free, and the tenant may have more."""

    def release_slots(self, count: int, tenant: str) -> None:
        """Release slots of a tenant."""

    def start(self, items: Sequence[BatchItem]) -> None:
        """Send requests to the core and pass their outputs to the items."""

    def finish(self, item: BatchItem) -> None:
        """Forget a request that the core has finished."""

    def abort(self, items: Sequence[BatchItem]) -> None:
        """Forget requests, and make the core forget those that it has not finished."""


class BatchItem(OutputStream):
    """One request of a batch."""

    __slots__ = (
        *(
            "_batch",
            "cached_tokens",
            "loaded_tokens",
            "ended",
            "error",
            "finish_reason",
            "finished_by_core",
            "index",
            "request",
            "times",
        ),
    )

    def __init__(self, batch: PooledBatch, index: int, request: PoolRequest) -> None:
        self.request: PoolRequest = request
        self.index = index
        self.times = request.new_times()
        self.finish_reason: FinishReason | None = None
        self.finished_by_core = False
        self.cached_tokens = self.loaded_tokens = 0
        self.error = ""
        self.ended: Callable[[], None] | None = None
        self._batch = batch

    @property
    def request_id(self) -> str:
        """The id of the request in the engine."""
        return f"{self._batch.id}-{self.index}"

    @override
    def put(self, output: RequestOutput) -> None:
        if not isinstance(output, PooledOutput):
            self.finished_by_core = True
            self.fail(error_of(output, PooledOutput))
            return
        self.finished_by_core = True
        self.finish_reason = "stop"
        self.cached_tokens, self.loaded_tokens = output.cached_tokens, output.loaded_tokens
        self._batch.take(self, output.data)

    @override
    def fail(self, error: EngineError) -> None:
        self.finish_reason = "error"
        self.error = type(error).__name__
        self._batch.fail(error, self.index)

    @override
    def record(self, request_id: str) -> RequestRecord:
        return pooled_record(self, self.request, request_id, self.cached_tokens, self.loaded_tokens, self.error)


class PooledBatch:
    """The requests, added in any number of calls, and their results in the same order.

    The first request that fails ends the batch. The caller has reserved one slot, so that there always is progress;
    others are taken while they are free and held as long as a request runs.

    Attributes:
        id: id of the batch, and the beginning of its requests' ids.
        failed: index of the request that has failed, if one did.
        cached_tokens: prompt tokens of all requests that were found in the prefix cache.
    """

    def __init__(self, host: BatchClient, on_result: OnResult | None = None, tenant: str = "") -> None:
        """Make an empty batch.

        Args:
            host: the client of the engine.
            on_result: from the index and array of a result to the array to keep; None: keep it as it is.
            tenant: holds the slots.
        """
        self.id = uuid.uuid4().hex
        self.failed: int | None = None
        self.cached_tokens = 0
        self._host = host
        self._tenant = tenant
        self._on_result = on_result
        self._pending: deque[BatchItem] = deque()
        self._running: dict[int, BatchItem] = {}
        self._keeping: set[asyncio.Future[PooledArray]] = set()
        self._arrays: list[PooledArray | None] = []
        self._left = 0  # requests without a result
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._refilling = False

    @property
    def size(self) -> int:
        """Number of requests so far."""
        return len(self._arrays)

    def add(self, requests: Sequence[PoolRequest]) -> None:
        """Send requests, or let them wait for those before them.

        Raises:
            EngineError: a request before these has failed.
        """
        if self._error is not None:
            raise self._error
        start = len(self._arrays)
        self._pending.extend(BatchItem(self, start + i, request) for i, request in enumerate(requests))
        self._arrays += [None] * len(requests)
        self._left += len(requests)
        self._refill()

    async def results(self) -> list[PooledArray]:
        """Wait for the results of all requests that were added.

        Raises:
            RequestRefused: the core does not accept a request.
            RequestFailed: the engine failed while it ran a request.
            EngineDead: the engine has stopped.
            DeadlineExceeded: the timeout has passed.
            Exception: `on_result` has failed.
        """
        if self._left and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return [array for array in self._arrays if array is not None]

    def take(self, item: BatchItem, data: PooledArray) -> None:
        """Take the result of a request, and send another one soon."""
        result = data if self._on_result is None else self._on_result(item.index, data)
        if isinstance(result, np.ndarray):
            self._finish(item, result)
            return
        keeping = asyncio.ensure_future(result)
        self._keeping.add(keeping)
        keeping.add_done_callback(partial(self._take_kept, item))

    def _take_kept(self, item: BatchItem, keeping: asyncio.Future[PooledArray]) -> None:
        self._keeping.discard(keeping)
        if keeping.cancelled():
            return
        if (error := keeping.exception()) is not None:
            assert isinstance(error, Exception)
            self.fail(error, item.index)
        elif item.index in self._running:
            self._finish(item, keeping.result())

    def _finish(self, item: BatchItem, array: PooledArray) -> None:
        self._arrays[item.index] = array
        self.cached_tokens += item.cached_tokens
        self._left -= 1
        del self._running[item.index]
        if self._running:  # the first slot is the caller's
            self._host.release_slots(1, self._tenant)
        self._host.finish(item)
        if not self._left:
            self._wake()
        elif self._pending and not self._refilling:  # once, after all outputs of the step
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)

    def fail(self, error: Exception, index: int | None = None) -> None:
        """End the batch: `results` raises the error."""
        if self._error is None:
            self._error, self.failed = error, index
        self._wake()

    def close(self) -> None:
        """Abort running requests and release their slots."""
        self._pending.clear()
        for keeping in self._keeping:
            keeping.cancel()
        running, self._running = list(self._running.values()), {}
        if running:
            self._host.release_slots(len(running) - 1, self._tenant)
            self._host.abort(running)

    def _refill(self) -> None:
        self._refilling = False
        items: list[BatchItem] = []
        while (
            self._pending and len(self._running) < _WINDOW and (not self._running or self._host.take_slot(self._tenant))
        ):
            item = self._pending.popleft()
            self._running[item.index] = item
            items.append(item)
        if items and self._error is None:
            try:
                self._host.start(items)
            except EngineError as error:
                self.fail(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@contextmanager
def open_batch(
    client: BatchClient, deadline: Deadline, on_result: OnResult | None, tenant: str
) -> Iterator[PooledBatch]:
    """A batch of a client; see `Engine.pool_batch`."""
    deadline.check()
    batch = PooledBatch(client, on_result, tenant)
    stop_alarm = deadline.call(lambda error: turns().run(ENDINGS, partial(batch.fail, error)))
    try:
        yield batch
    finally:
        stop_alarm()
        batch.close()

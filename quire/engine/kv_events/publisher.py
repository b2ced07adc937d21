"""KVEventPublisher: sends batches of events to subscribers, and again to those that have missed some."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass

import zmq

from quire.config.kv_events import KVEventsConfig
from quire.engine.client.model_info import KVEventSource
from quire.engine.kv_events.endpoints import EndpointUnavailable, endpoint_of, open_socket
from quire.engine.kv_events.messages import END_OF_REPLAY, BatchEncoder, EventBatch

logger = logging.getLogger(__name__)
_LINGER = 1000  # milliseconds in which the last batches reach subscribers when the engine ends
_OVERHEAD = 512  # bytes of a batch beside those of its events
_MOST_REPLAYS = 64  # of different subscribers at the same time
_REPLAY_QUEUE = 64  # messages that wait for a subscriber that is sent what it has missed
_RETRY = 10  # milliseconds until a subscriber is sent more, if it has not read what waits for it
_PATIENCE = 30.0  # seconds for which it may read nothing
_LARGEST_REQUEST = 1024  # bytes of what a subscriber sends


@dataclass(slots=True)
class _Queued:
    """A batch that waits to be sent. `nbytes`: its size, estimated."""

    sequence: int
    batch: EventBatch
    nbytes: int


@dataclass(slots=True)
class _Replay:
    """What a subscriber is sent again: batches from `next` to before `end`. `progress`: when it last took one."""

    next: int
    end: int
    progress: float


class KVEventPublisher:
    """Send batches, from a thread of its own.

    `publish` never waits: where a batch cannot be held, its sequence number is missing. A subscriber that reads too
    slowly misses messages as well, and can ask for them.

    Attributes:
        source: what subscribers need to know.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Bind the sockets and start the thread. `rank`: see `endpoint_of`.

        Raises:
            EndpointUnavailable: a socket cannot be bound.
        """
        self._config = config
        self._topic = config.topic.encode()
        self._encoder = BatchEncoder(config.encoding)
        self._lock = threading.Lock()
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._sequence = 0  # of the next batch
        self._dropped = 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # batches that were sent; the thread's, like what follows
        self._kept_bytes = 0
        self._sent = 0  # the sequence number behind that of the last batch that was sent
        self._replays: OrderedDict[bytes, _Replay] = OrderedDict()  # by subscriber
        self._closing = False
        self._context = zmq.Context()
        self._pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self.source = self._open(rank)
        except EndpointUnavailable:
            self._context.destroy(linger=0)
            raise
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch, nbytes: int) -> None:
        """Send a batch soon. `nbytes`: its size, estimated."""
        nbytes += _OVERHEAD
        with self._lock:
            sequence, self._sequence = self._sequence, self._sequence + 1
            is_full = len(self._queue) >= self._config.max_queue_size
            if is_full or self._queued_bytes + nbytes > self._config.buffer_bytes:
                self._dropped += 1
                dropped = self._dropped
            else:
                self._queue.append(_Queued(sequence, batch, nbytes))
                self._queued_bytes += nbytes
                dropped = 0
        if dropped and dropped & (dropped - 1) == 0:  # the first, the second, the fourth...
            logger.warning("%d batches of KV events were dropped: too many wait to be sent", dropped)
        self._notify()

    def close(self) -> None:
        """Send what waits, but not for long."""
        self._closing = True
        self._notify()
        self._thread.join(2 * _LINGER / 1000)

    def _notify(self) -> None:
        with suppress(BlockingIOError, OSError):  # it has been notified; it has ended
            self._wake.send(b"\0")

    def _open(self, rank: int) -> KVEventSource:
        config = self._config
        for opened in (self._pub, self._router):
            opened.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._router.setsockopt(zmq.SNDHWM, _REPLAY_QUEUE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so if a message cannot be sent
        replay = None
        if config.replay_endpoint is not None:
            replay = open_socket(self._router, endpoint_of(config.replay_endpoint, rank))
        return KVEventSource(
            endpoint=open_socket(self._pub, endpoint_of(config.endpoint, rank), connects=True),
            replay_endpoint=replay,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
            encoding=config.encoding,
            buffer_bytes=config.buffer_bytes,
        )

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll(_RETRY if self._replays else None)
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._send_queued()
                self._accept_replays()
                self._continue_replays()
            self._send_queued()
        finally:
            self._wake.close()
            self._woken.close()
            self._pub.close(linger=_LINGER)
            self._router.close(linger=0)
            self._context.term()

    def _send_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                queued = self._queue.popleft()
                self._queued_bytes -= queued.nbytes
            payload = self._encoder.encode(queued.batch)
            self._pub.send_multipart((self._topic, queued.sequence.to_bytes(8), payload))
            self._sent = queued.sequence + 1
            if self._config.replay_endpoint is not None:
                self._keep(queued.sequence, payload)

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._kept[sequence] = payload
        self._kept_bytes += len(payload) + _OVERHEAD
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > self._config.buffer_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest) + _OVERHEAD

    def _accept_replays(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.debug("dropped a malformed request for KV events")
                continue
            self._replays.pop(frames[0], None)
            if len(self._replays) == _MOST_REPLAYS:
                self._replays.popitem(last=False)
            self._replays[frames[0]] = _Replay(int.from_bytes(frames[2]), self._sent, time.monotonic())

    def _continue_replays(self) -> None:
        """Send each subscriber what it takes of what it has missed."""
        for subscriber, replay in list(self._replays.items()):
            try:
                self._continue(subscriber, replay)
            except zmq.Again:
                if time.monotonic() < replay.progress + _PATIENCE:
                    continue
            except zmq.ZMQError as error:  # it has gone
                logger.debug("a subscriber is not sent KV events again: %s", error)
            del self._replays[subscriber]

    def _continue(self, subscriber: bytes, replay: _Replay) -> None:
        oldest = next(iter(self._kept), self._sent)
        for sequence in range(max(replay.next, oldest), replay.end):
            payload = self._kept.get(sequence)
            if payload is not None:
                self._reply(subscriber, self._topic, sequence.to_bytes(8), payload)
                replay.progress = time.monotonic()
            replay.next = sequence + 1
        self._reply(subscriber, b"", END_OF_REPLAY, b"")

    def _reply(self, subscriber: bytes, *frames: bytes) -> None:
        self._router.send_multipart((subscriber, b"", *frames), zmq.NOBLOCK)

"""Export of spans by a thread: what waits is bounded, and what cannot be sent is dropped and counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from typing_extensions import override

from quire.tracing.settings import TraceSettings
from quire.tracing.span import SpanQueue, SpanTree

logger = logging.getLogger(__name__)
_LOGGERS = (  # of exporters
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_SPANS_AT_ONCE = 8  # that are made or encoded before other threads have their turn: some tenths of a millisecond
_PAUSE = 1e-5  # seconds; the operating system makes more of it, in which another thread gets the interpreter's lock
_END_SECONDS = 0.2  # for an export that has been told to end


class SpanExport(SpanQueue):
    """The spans that wait to be exported, and the thread that does so. Spans may come from several threads.

    Attributes:
        settings: where they are exported to, and how many may wait.
        dropped: spans that were not exported: the queue was full, or the collector did not take them.
    """

    def __init__(
        self, exporter: SpanExporter, spans: Callable[[SpanTree], list[ReadableSpan]], settings: TraceSettings
    ) -> None:
        """Start the thread. `spans`: makes the spans of a tree."""
        self.dropped = 0
        self._exporter = exporter
        self._spans = spans
        self.settings = settings
        self._waiting: deque[SpanTree] = deque()
        self._size = 0  # spans that wait, at most
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._on_drop: Callable[[int], None] = lambda count: None
        self._complaint = _Complaint()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="quire-traces", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait, at most."""
        return self._size

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def count_drops(self, on_drop: Callable[[int], None]) -> None:
        """Call a function with the number of dropped spans: of those so far, and whenever there are more."""
        on_drop(self.dropped)
        self._on_drop = on_drop

    @override
    def put(self, tree: SpanTree) -> None:
        with self._lock:
            full = self._closed.is_set() or self._size + tree.most_spans > self.settings.max_queue_size
            if not full:
                self._waiting.append(tree)
                self._size += tree.most_spans
        if full:
            self._drop(tree.most_spans)
        elif self._size >= self.settings.max_batch_size:
            self._wake.set()

    def close(self, seconds: float) -> None:
        """Export what waits, but not for longer than this, and end the thread."""
        self._closed.set()
        self._wake.set()
        if not self._failing:  # else it would not succeed now
            self._thread.join(seconds)
        self._exporter.shutdown()  # ends its waits before further attempts
        self._thread.join(_END_SECONDS)
        self._complaint.close()
        if self.dropped:
            logger.warning("%d spans of traces were not exported", self.dropped)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self.settings.delay)
            self._wake.clear()
            self._export(self._take())
            while self._size >= self.settings.max_batch_size or (self._closed.is_set() and self._waiting):
                self._export(self._take())

    def _take(self) -> list[SpanTree]:
        """What is exported next; it may be nothing."""
        batch: list[SpanTree] = []
        size = 0
        with self._lock:
            while self._waiting and size < self.settings.max_batch_size:
                batch.append(self._waiting.popleft())
                size += batch[-1].most_spans
            self._size -= size
        return batch

    def _export(self, batch: list[SpanTree]) -> None:
        if not batch:
            return
        spans = _PacedSpans()
        result = SpanExportResult.FAILURE
        try:
            for tree in batch:
                spans += self._spans(tree)
                time.sleep(_PAUSE)
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 the edge of the thread: it must go on with later spans
            self._complaint.text = f"{type(error).__name__}: {error}"
        if result is not SpanExportResult.SUCCESS:
            self._drop(len(spans))
            if not self._failing:
                logger.warning("traces cannot be exported: %s", self._complaint.text)
        elif self._failing:
            logger.info("traces are exported again; %d spans were dropped so far", self.dropped)
        self._failing = result is not SpanExportResult.SUCCESS

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count
        self._on_drop(count)


class _PacedSpans(list[ReadableSpan]):
    """Spans that are encoded while they are iterated over, in which other threads have their turns now and then."""

    @override
    def __iter__(self) -> Iterator[ReadableSpan]:
        for index, span in enumerate(super().__iter__(), 1):
            if index % _SPANS_AT_ONCE == 0:
                time.sleep(_PAUSE)
            yield span


class _Complaint(logging.Filter):
    """Keeps the last message that the exporter logs, as a collector that is down would fill the log with them."""

    def __init__(self) -> None:
        super().__init__()
        self.text = "the collector did not take them"
        for name in _LOGGERS:
            logging.getLogger(name).filters.insert(0, self)  # before the one that drops what was said lately

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.threadName != "quire-traces":
            return True
        self.text = record.getMessage()
        return False

    def close(self) -> None:
        """Keep no more messages."""
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self)

"""Export of spans: what waits is bounded, and what cannot be sent is dropped and counted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from typing_extensions import override

from quire.otlp.settings import OtlpSettingsError, TraceSettings
from quire.tracing.exporter import Exported, ExporterProcess
from quire.tracing.span import SpanQueue, SpanSource

logger = logging.getLogger(__name__)
_END_SECONDS = 0.2  # for an export that has been told to end


class _Encoded(NamedTuple):
    """The source of some spans."""

    content: bytes
    spans: int


class SpanExport(SpanQueue):
    """The spans that wait to be exported, and the thread that gives them to the process that does so.

    Spans may come from several threads.

    Attributes:
        settings: where they are exported to, and how many may wait.
        dropped: spans that were not exported: the queue was full, or the collector did not take them.
    """

    def __init__(self, settings: TraceSettings) -> None:
        """Start the process and the thread.

        Raises:
            OtlpSettingsError: a variable of OpenTelemetry's SDK is not valid.
        """
        self.dropped = 0
        self.settings = settings
        self._exporter: ExporterProcess | None = ExporterProcess(settings)
        self._waiting: deque[_Encoded] = deque()
        self._size = 0  # spans that wait
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._on_drop: Callable[[int], None] = lambda count: None
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="quire-traces", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
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
    def put(self, source: SpanSource) -> None:
        spans = source.count
        with self._lock:
            full = self._closed.is_set() or self._size + spans > self.settings.max_queue_size
            if not full:
                self._waiting.append(_Encoded(self._encode(source), spans))
                self._size += spans
        if full:
            self._drop(spans)
        elif self._size >= self.settings.max_batch_size:
            self._wake.set()

    def close(self, seconds: float) -> None:
        """Export what waits, but not for longer than this, and end the thread."""
        self._closed.set()
        self._wake.set()
        if not self._failing:  # else it would not succeed now
            self._thread.join(seconds)
        self._stop_exporter()
        self._thread.join(_END_SECONDS)
        if self.dropped:
            logger.warning("%d spans of traces were not exported", self.dropped)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self.settings.delay)
            self._wake.clear()
            self._export(self._take())
            while self._size >= self.settings.max_batch_size or (self._closed.is_set() and self._waiting):
                self._export(self._take())

    def _take(self) -> list[_Encoded]:
        """What is exported next; it may be nothing."""
        batch = list[_Encoded]()
        size = 0
        with self._lock:
            while self._waiting and size < self.settings.max_batch_size:
                batch.append(self._waiting.popleft())
                size += batch[-1].spans
            self._size -= size
        return batch

    def _export(self, batch: list[_Encoded]) -> None:
        if not batch:
            return
        exported = self._try_export(batch)
        if exported.spans:
            self._drop(exported.spans)
            if not self._failing:
                logger.warning("traces cannot be exported: %s", exported.complaint)
        elif self._failing:
            logger.info("traces are exported again; %d spans were dropped so far", self.dropped)
        self._failing = bool(exported.spans)

    def _try_export(self, batch: list[_Encoded]) -> Exported:
        """Give a batch to the process, which is started again if it has ended, as when it was killed."""
        try:
            if self._exporter is None and not self._closed.is_set():
                self._exporter = ExporterProcess(self.settings)
            if (exporter := self._exporter) is None:
                raise EOFError
            return exporter.export([msgspec.Raw(source.content) for source in batch])
        except (EOFError, OSError, OtlpSettingsError) as error:
            self._stop_exporter()
            return Exported(sum(source.spans for source in batch), f"their process has ended ({type(error).__name__})")

    def _stop_exporter(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.kill()

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count
        self._on_drop(count)

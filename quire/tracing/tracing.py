"""Tracing: follows requests from their arrival to their end, and gives what is known of them to be exported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import msgspec
from typing_extensions import override

from quire.engine.client.origin import RequestNotes, current_origin, set_current_origin
from quire.engine.client.records import Observer, RequestRecord
from quire.engine.client.trace_context import TraceContext
from quire.tracing.requests import RequestHead, RequestTrace
from quire.tracing.span import Attributes, SpanQueue

TRANSCRIPTION = "transcription"


class Sampler(Protocol):
    """Decides which requests are traced, and makes ids."""

    def begin(self, parent: TraceContext | None, attributes: Callable[[], Attributes]) -> TraceContext:
        """A new span, and whether it is sampled.

        Args:
            parent: the span of the client; None if there is none.
            attributes: makes those that are known of the span.
        """

    def child(self, parent: TraceContext) -> TraceContext:
        """A new span in the trace of another one, which is sampled."""


class Tracing:
    """The traces of a server. Belongs to its event loop."""

    def __init__(self, sampler: Sampler, queue: SpanQueue) -> None:
        self._sampler = sampler
        self._queue = queue
        self._open: dict[str, RequestTrace] = {}  # by the id of their spans

    @property
    def open_traces(self) -> int:
        """Number of sampled requests that have not ended."""
        return len(self._open)

    def begin(
        self,
        began: float,
        attributes: Callable[[], Attributes],
        *,
        parent: TraceContext | None = None,
        notes: RequestNotes,
    ) -> RequestTrace:
        """The trace of a request that has arrived. Nothing is exported of it unless its `context` is sampled.

        Args:
            began: monotonic seconds.
            attributes: makes those that are known of it, if a sampler reads them.
            parent: the span of the client.
            notes: what will be learnt about it.
        """
        context = self._sampler.begin(parent, attributes)
        trace = RequestTrace(context=context, parent=parent, began=began, notes=notes)
        if context.sampled:
            self._open[context.span_id] = trace
        return trace

    def end(self, trace: RequestTrace) -> None:
        """Export a trace, if it is sampled: its request has ended now."""
        if self._open.pop(trace.context.span_id, None) is not None:
            trace.end(time.monotonic())
            self._queue.put(trace)

    def observer(self, model: str) -> Observer:
        """An observer of the engine of a model."""
        return _ModelObserver(self, model)

    @contextmanager
    def utterance(self) -> Iterator[None]:
        """A context in which an utterance of the current task's session is transcribed: a trace of its own."""
        session = current_origin()
        began = time.monotonic()
        head = RequestHead(request_id=session.request_id)
        trace = self.begin(began, head.attributes, notes=RequestNotes(TRANSCRIPTION))
        trace.head, trace.link = head, session.trace
        if session.trace is not None and not session.trace.sampled:
            self._open.pop(trace.context.span_id, None)
            trace.context = msgspec.structs.replace(trace.context, sampled=False)
        set_current_origin(replace(session, arrived=began, trace=trace.context, notes=trace.notes))
        try:
            yield
        except BaseException as error:
            trace.error = type(error).__name__
            raise
        finally:
            self.end(trace)

    def add(self, record: RequestRecord, model: str) -> None:
        """Take note of a sequence that has ended. One of a response in the background may outlive its request."""
        context = record.origin.trace
        if context is None or not context.sampled:
            return
        trace = self._open.get(context.span_id)
        if trace is not None:
            trace.add(record, model)
            return
        late = RequestTrace(
            context=self._sampler.child(context),
            parent=context,
            kind="internal",
            notes=RequestNotes("chat" if record.kind == "generate" else "pooling"),
            began=record.times.queued,
        )
        late.add(record, model)
        late.end(record.times.sent)
        self._queue.put(late)


class _ModelObserver(Observer):
    """Gives the ends of a model's sequences to the traces that they are part of."""

    def __init__(self, tracing: Tracing, model: str) -> None:
        self._tracing = tracing
        self._model = model

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self._tracing.add(record, self._model)

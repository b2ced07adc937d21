"""Receivers of OpenTelemetry's protocol, and what they have received."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from typing_extensions import override

from quire.otlp.settings import Collector, Protocol, TraceSettings
from quire.tracing.start import RunningTraces, start_traces
from tests.support.patience import PATIENCE
from tests.support.server import Server, running_server

_KINDS = {1: "internal", 2: "server", 3: "client"}
_STATUSES = {0: "unset", 1: "ok", 2: "error"}


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector sees it. Ids are hexadecimal, times nanoseconds of the day; `links` are (trace, span)."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    began: int
    ended: int
    state: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    service: dict[str, Any]


@dataclass
class Receiver:
    """Spans that have been received, in any order.

    Attributes:
        protocol, endpoint: where it listens.
        requests: export requests.
        hold: while it is not set, no request is answered.
        refuses: requests are refused.
    """

    protocol: Protocol
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.hold.set()

    def take(self, request: ExportTraceServiceRequest) -> bool:
        """Keep the spans of a request; returns False to refuse them."""
        self.requests += 1
        self.hold.wait(PATIENCE)
        if not self.refuses:
            self.spans += _spans_of(request)
        return not self.refuses

    def settings(self, **settings: Any) -> TraceSettings:
        return TraceSettings(Collector(self.endpoint, self.protocol), **{"delay": 0.02, **settings})

    def tree(self) -> tuple[ReceivedSpan, dict[str, list[ReceivedSpan]]]:
        """The only span whose parent is not here, and the children of each span by its id."""
        ids = {span.span_id for span in self.spans}
        (root,) = (span for span in self.spans if span.parent_id not in ids)
        children: dict[str, list[ReceivedSpan]] = {span.span_id: [] for span in self.spans}
        for span in sorted(self.spans, key=lambda span: span.began):
            if span is not root:
                children[span.parent_id].append(span)
        return root, children

    def names(self) -> Any:
        """The names of the trace: of a span without children its name, else a pair of the name and its children's."""
        root, children = self.tree()

        def named(span: ReceivedSpan) -> Any:
            parts = [named(child) for child in children[span.span_id]]
            return (span.name, parts) if parts else span.name

        return named(root)

    def check(self) -> None:
        """Assert that all spans are of one trace, and lie within their parents."""
        root, children = self.tree()
        assert {span.trace_id for span in self.spans} == {root.trace_id}
        assert len({span.span_id for span in self.spans}) == len(self.spans)
        for span in self.spans:
            assert span.began <= span.ended
            for child in children[span.span_id]:
                assert span.began <= child.began, (span.name, child.name)
                assert child.ended <= span.ended, (span.name, child.name)


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """A collector that speaks gRPC."""
    receiver = Receiver("grpc")

    class Servicer(TraceServiceServicer):
        @override
        def Export(self, request: Any, context: Any) -> Any:
            if not receiver.take(request):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "not today")
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield receiver
        finally:
            receiver.hold.set()
            server.stop(0).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """A collector that speaks HTTP."""
    receiver = Receiver("http/protobuf")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            taken = self.path == "/v1/traces" and receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if taken else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        @override
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.hold.set()
            server.shutdown()
            thread.join()


@contextmanager
def traces_to(receiver: Receiver, **settings: Any) -> Iterator[RunningTraces]:
    """Traces that a receiver gets, all of them at the end at the latest."""
    traces = start_traces(receiver.settings(**settings))
    try:
        yield traces
    finally:
        traces.export.close(PATIENCE)


@asynccontextmanager
async def traced_server(
    folder: Path, *cores: Any, receiver: Receiver, run: Callable[..., Any] = running_server, **settings: Any
) -> AsyncIterator[Server]:
    """A server whose traces a receiver has at the end. `run`: makes the server."""
    traces = start_traces(receiver.settings())
    try:
        async with run(folder, *cores, tracing=traces.tracing, **settings) as server:
            yield server
    finally:
        await asyncio.to_thread(traces.export.close, PATIENCE)


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = {entry.key: _value(entry.value) for entry in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=_KINDS[span.kind],
                    status=_STATUSES[span.status.code],
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    state=span.trace_state,
                    attributes={entry.key: _value(entry.value) for entry in span.attributes},
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    service=service,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))

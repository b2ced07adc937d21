"""Spans as messages of OTLP.

The encoder of OpenTelemetry's exporters takes spans of its SDK, and 0.24 ms for the nine spans of a request, most of it
for their attributes. This one keeps the bytes of attributes that many requests have, and makes each span where it is
sent from, as messages of protobuf are copied when they become a part of others.
"""

from __future__ import annotations

import random
import struct
from functools import lru_cache

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from quire import __version__
from quire.engine.client.trace_context import TraceContext
from quire.otlp.service import service_of
from quire.tracing.span import AttributeValue, Span, SpanTree

_KINDS = {"server": SpanMessage.SPAN_KIND_SERVER, "internal": SpanMessage.SPAN_KIND_INTERNAL}
_FAILED = trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR)
_LOCAL = int(trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)  # what the parent of a span is
_REMOTE = _LOCAL | int(trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
_SPAN_ID_BYTES = 8
_KEPT = 4096  # attributes of short texts, which take a megabyte or two
_SHORT = 64  # characters; longer texts are chosen by clients
_DOUBLE = struct.Struct("<d")  # the end of an attribute with a number that is not an integer


class SpanBatch:
    """The spans that are exported together.

    Attributes:
        request: the message that exports them.
        spans: those in it.
    """

    def __init__(self, instance: str) -> None:
        """`instance`: see `service_of`."""
        service = service_of(instance)
        attributes = [KeyValue(key=name, value=_value(str(value))) for name, value in service.attributes.items()]
        resource = Resource(attributes=attributes)
        scope = ScopeSpans(scope=InstrumentationScope(name="quire", version=__version__))
        self._service = ResourceSpans(resource=resource, schema_url=service.schema_url, scope_spans=[scope])
        self.clear()

    def clear(self) -> None:
        """Begin a new request; what is removed from one keeps its memory."""
        self.request = ExportTraceServiceRequest(resource_spans=[self._service])
        self.spans = self.request.resource_spans[0].scope_spans[0].spans

    def add(self, tree: SpanTree) -> None:
        """Add the spans of a tree, or none of them.

        Raises:
            ValueError: an id is not hexadecimal.
        """
        before = len(self.spans)
        try:
            self._add(tree)
        except BaseException:
            del self.spans[before:]
            raise

    def _add(self, tree: SpanTree) -> None:
        context, parent = tree.context, tree.parent
        span_id = bytes.fromhex(context.span_id)
        trace = _Trace(bytes.fromhex(context.trace_id), context.state, tree.wall_offset)
        root = self._message(tree.span, trace, span_id, b"" if parent is None else bytes.fromhex(parent.span_id))
        if parent is not None and tree.span.kind == "server":
            root.flags = _REMOTE
        if tree.span.link is not None:
            root.links.append(_link(tree.span.link))
        self._add_parts(tree.span, span_id, trace)

    def _add_parts(self, span: Span, parent_id: bytes, trace: _Trace) -> None:
        """Add the parts of a span, which have no links."""
        for child in span.children:
            span_id = random.randbytes(_SPAN_ID_BYTES)
            self._message(child, trace, span_id, parent_id)
            if child.children:
                self._add_parts(child, span_id, trace)

    def _message(self, span: Span, trace: _Trace, span_id: bytes, parent_id: bytes) -> SpanMessage:
        message: SpanMessage = self.spans.add(
            trace_id=trace.trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            trace_state=trace.state,
            name=span.name,
            kind=_KINDS[span.kind],
            start_time_unix_nano=int(span.began * 1e9) + trace.wall_offset,
            end_time_unix_nano=int(max(span.began, span.ended) * 1e9) + trace.wall_offset,
            status=_FAILED if span.failed else None,
            flags=_LOCAL,
        )
        if span.attributes:
            message.MergeFromString(b"".join([_attribute(name, value) for name, value in span.attributes.items()]))
        return message


class _Trace:
    """What the spans of a tree have in common."""

    __slots__ = ("state", "trace_id", "wall_offset")

    def __init__(self, trace_id: bytes, state: str, wall_offset: int) -> None:
        self.trace_id = trace_id
        self.state = state
        self.wall_offset = wall_offset


def _link(context: TraceContext) -> SpanMessage.Link:
    return SpanMessage.Link(
        trace_id=bytes.fromhex(context.trace_id), span_id=bytes.fromhex(context.span_id), flags=_LOCAL
    )


def _attribute(name: str, value: AttributeValue) -> bytes:
    """The bytes that add an attribute to the message of a span."""
    if isinstance(value, float):  # the seconds of one request
        return _before_double(name) + _DOUBLE.pack(value)
    if isinstance(value, str) and len(value) > _SHORT:
        return _encoded(name, value)
    return _frequent_attribute(name, value)


@lru_cache(_KEPT)
def _frequent_attribute(name: str, value: str | int | tuple[str, ...]) -> bytes:
    return _encoded(name, value)


@lru_cache(_KEPT)
def _before_double(name: str) -> bytes:
    """What comes before the eight bytes of a number, which are the last of such an attribute."""
    return _encoded(name, 1.0)[: -_DOUBLE.size]


def _encoded(name: str, value: AttributeValue) -> bytes:
    encoded: bytes = SpanMessage(attributes=[KeyValue(key=name, value=_value(value))]).SerializeToString()
    return encoded


def _value(value: AttributeValue) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in value]))

"""The spans that are made of a request where they are exported: as many as were reserved for it where it ended."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.client.origin import Activity, Origin, RequestNotes
from quire.engine.client.records import RequestRecord
from quire.engine.client.timeline import RequestTimes
from quire.engine.client.trace_context import TraceContext
from quire.tracing.request_span import request_span
from quire.tracing.requests import RequestTrace
from quire.tracing.span import SpanKind

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
WHOLE = RequestTimes(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
REFUSED = RequestTimes(1.0, 1.1, 1.2, sent=1.3)
POOLED = RequestTimes(1.0, 1.1, 1.2, 1.3, sent=1.4)


def record(times: RequestTimes, *, is_search_step: bool = False) -> RequestRecord:
    return RequestRecord(
        request_id="one",
        origin=Origin(),
        kind="generate",
        times=times,
        finish_reason="stop",
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=1,
        answers=0 if is_search_step else 1,
        is_search_step=is_search_step,
    )


@pytest.mark.parametrize("kind", ["server", "internal"])
@pytest.mark.parametrize(
    "records",
    [
        [],
        *([record(times)] for times in (WHOLE, REFUSED, POOLED)),
        [record(WHOLE), record(REFUSED)],
        [record(WHOLE)] * 40,
        [record(WHOLE, is_search_step=True)] * 3,
    ],
)
@pytest.mark.parametrize("activities", [[], [Activity("render", 1.0, 1.1), Activity("execute_tool x", 1.7, 1.8)]])
def test_a_request_has_as_many_spans_as_it_says(
    kind: SpanKind, records: list[RequestRecord], activities: list[Activity]
) -> None:
    trace = RequestTrace(context=CONTEXT, kind=kind, notes=RequestNotes("chat", activities=activities), began=1.0)
    for each in records:
        trace.add(each, "fake")
    trace.end(2.0)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(trace), type=RequestTrace)
    span = request_span(received)
    assert trace.count == received.count == span.count
    prompts = len(records) if records and records[0].answers else min(1, len(records))  # of a beam search one
    assert span.attributes.get("gen_ai.usage.input_tokens", 0) == 7 * prompts

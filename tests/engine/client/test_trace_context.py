"""Headers of W3C Trace Context, and the trace of an origin."""

from __future__ import annotations

import pytest

from quire.engine.client.origin import Origin
from quire.engine.client.trace_context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # with a flag of a later version
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
    ],
)
def test_a_valid_header_is_read(traceparent: str, sampled: bool) -> None:
    assert TraceContext.parse(traceparent, "a=1") == TraceContext(TRACE, SPAN, sampled, "a=1")


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_header_begins_no_trace(traceparent: str) -> None:
    assert TraceContext.parse(traceparent) is None


def test_a_context_is_passed_on_as_headers() -> None:
    context = TraceContext(TRACE, SPAN, state="a=1,b=2")
    assert context.headers == {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,b=2"}
    assert TraceContext(TRACE, SPAN, sampled=False).headers == {"traceparent": f"00-{TRACE}-{SPAN}-00"}


def test_a_state_beyond_the_length_that_must_be_passed_on_is_dropped() -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-01", "a=" + "1" * 600)
    assert context is not None
    assert context.state == ""


def test_the_span_of_an_origin_is_its_own_or_else_that_of_the_client() -> None:
    client, own = TraceContext(TRACE, SPAN), TraceContext(TRACE, "1" * 16)
    assert Origin("request", client).span == client
    assert Origin("request", client, trace=own).span == own
    assert Origin("request").span is None
    assert Origin("request", client).trace_headers == {}  # without tracing, nobody learns of it

"""The spans of a request that has ended: what took how long, from the times that are known of it."""

from __future__ import annotations

from quire.engine.client.timeline import RequestTimes
from quire.tracing.requests import RequestTrace, SequenceTrace, Totals
from quire.tracing.span import Attributes, Span

PROVIDER = "quire"
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


def request_span(trace: RequestTrace) -> Span:
    """The span of a request, and those of its parts.

    A request with one sequence has the phases of that sequence: queue, prefill and decode. One with several has a span
    for each of them, up to a number, and phases in these. Their number is `RequestTrace.count`.
    """
    totals = trace.totals()
    span = Span(
        _name(trace),
        trace.began,
        trace.ended,
        _attributes(trace, totals),
        kind=trace.kind,
        link=trace.link,
        failed=_has_failed(trace, totals),
    )
    times = totals.times
    queued = times.queued or trace.ended
    before = [Span(note.name, note.began, note.ended) for note in trace.notes.activities if note.began < queued]
    if trace.kind == "server" and (times.queued or before):
        span.children.append(Span("preprocess", trace.began, queued, {}, before))
    if trace.has_one_sequence:
        span.children += _phases(trace.sequences[0])
    else:
        span.children += [_sequence(sequence) for sequence in trace.sequences]
    if steps := totals.search_steps:
        tokens = totals.output_tokens
        search: Attributes = {"quire.beam_search.steps": steps, "gen_ai.usage.output_tokens": tokens}
        span.children.append(Span("beam_search", times.queued, times.last_token or times.sent, search))
    span.children += [
        Span(note.name, note.began, note.ended) for note in trace.notes.activities if note.began >= queued
    ]
    computed = times.last_token or times.sent
    if trace.kind == "server" and computed:
        span.children.append(Span("respond", min(computed, trace.ended), trace.ended))
    return span


def _has_failed(trace: RequestTrace, totals: Totals) -> bool:
    """Whether the span of a request has the status ERROR: the server failed, not the client."""
    if trace.status is not None and _CLIENT_ERROR <= trace.status < _SERVER_ERROR:
        return False
    return trace.failed or bool(trace.notes.error or totals.error) or (trace.status or 0) >= _SERVER_ERROR


def _name(trace: RequestTrace) -> str:
    model = trace.notes.model or trace.model
    if operation := trace.notes.operation:
        return f"{operation} {model}" if model else operation
    if trace.head is None:
        return ""
    return f"{trace.head.method} {trace.route}" if trace.route else trace.head.method


def _attributes(trace: RequestTrace, totals: Totals) -> Attributes:
    attributes = {} if trace.head is None else trace.head.attributes()
    if trace.route:
        attributes["http.route"] = trace.route
    if trace.status is not None:
        attributes["http.response.status_code"] = trace.status
    if error := _error_type(trace, totals):
        attributes["error.type"] = error
    if not trace.notes.operation:
        return attributes
    attributes |= {"gen_ai.operation.name": trace.notes.operation, "gen_ai.provider.name": PROVIDER}
    if model := trace.notes.model or trace.model:
        attributes["gen_ai.request.model"] = model
    if trace.notes.answer_id:
        attributes["gen_ai.response.id"] = trace.notes.answer_id
    if trace.model:
        attributes["gen_ai.response.model"] = trace.model
        if trace.params is not None:
            attributes |= trace.params.attributes()
        attributes |= _usage(trace, totals)
        attributes |= _latencies(trace, totals.times)
    return attributes


def _error_type(trace: RequestTrace, totals: Totals) -> str:
    """The low-cardinality name of what went wrong; empty if nothing did."""
    if trace.status is not None and trace.status >= _CLIENT_ERROR:
        return trace.error or str(trace.status)
    return trace.notes.error or totals.error or trace.error


def _usage(trace: RequestTrace, totals: Totals) -> Attributes:
    """Token counts, by today's names and by those that vLLM and SGLang have."""
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": tuple(totals.finish_reasons),
        "gen_ai.usage.input_tokens": totals.input_tokens,
        "gen_ai.usage.output_tokens": totals.output_tokens,
        "gen_ai.usage.prompt_tokens": totals.input_tokens,
        "gen_ai.usage.completion_tokens": totals.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": totals.cached_tokens,
        "gen_ai.usage.num_sequences": totals.sequences,
    }
    if trace.notes.reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = trace.notes.reasoning_tokens
    if (without := totals.sequences - len(trace.sequences)) > 0:
        attributes["quire.sequences_without_spans"] = without
    return attributes


def _latencies(trace: RequestTrace, times: RequestTimes) -> Attributes:
    """Seconds by the names that vLLM and SGLang have, of all sequences together."""
    attributes: Attributes = {"gen_ai.latency.e2e": trace.ended - trace.began}
    if times.scheduled:
        attributes["gen_ai.latency.time_in_queue"] = max(0.0, times.scheduled - times.queued)
    if times.first_token:
        attributes |= {
            "gen_ai.latency.time_to_first_token": times.first_token - trace.began,
            "gen_ai.latency.time_in_model_prefill": times.first_token - times.scheduled,
            "gen_ai.latency.time_in_model_decode": times.last_token - times.first_token,
            "gen_ai.latency.time_in_model_inference": times.last_token - times.scheduled,
        }
    return attributes


def _sequence(sequence: SequenceTrace) -> Span:
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": (sequence.finish_reason,),
        "gen_ai.usage.input_tokens": sequence.prompt_tokens,
        "gen_ai.usage.output_tokens": sequence.output_tokens,
    }
    return Span("sequence", sequence.times.queued, sequence.times.sent, attributes, _phases(sequence))


def _phases(sequence: SequenceTrace) -> list[Span]:
    """What a sequence went through, until its end wherever that was."""
    times = sequence.times
    scheduled = max(times.scheduled, times.queued) if times.scheduled else times.sent
    spans = [Span("queue", times.queued, scheduled)]
    if times.scheduled:
        spans.append(Span("prefill", scheduled, times.first_token or times.sent, _prefill_attributes(sequence)))
    if times.first_token:
        spans.append(Span("decode", times.first_token, times.last_token, _decode_attributes(sequence)))
    return spans


def _prefill_attributes(sequence: SequenceTrace) -> Attributes:
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": sequence.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": sequence.cached_tokens,
    }
    if sequence.prefill_chunks:
        attributes["quire.prefill.chunks"] = sequence.prefill_chunks
    return attributes


def _decode_attributes(sequence: SequenceTrace) -> Attributes:
    attributes: Attributes = {"gen_ai.usage.output_tokens": sequence.output_tokens}
    if sequence.draft_tokens:
        attributes["quire.draft_tokens"] = sequence.draft_tokens
        attributes["quire.accepted_draft_tokens"] = sequence.accepted_tokens
    if sequence.preemptions:
        attributes["quire.preemptions"] = sequence.preemptions
    return attributes

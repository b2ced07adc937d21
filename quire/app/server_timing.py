"""The header Server-Timing: where the time of a request went. Browsers show it beside the request."""

from __future__ import annotations

import time
from collections.abc import Iterator

from quire.engine.client.origin import Origin

HEADER = "server-timing"


def server_timing(origin: Origin, now: float | None = None) -> str:
    """Return the value of the header of a response that begins now, in milliseconds.

    The phases follow each other: preprocess (of which media and tokenize are parts), queue, prefill, decode. A stream
    begins before its request has reached the engine.

    Args:
        origin: the HTTP request.
        now: monotonic seconds; None: this moment.
    """
    return ", ".join(_metrics(origin, time.monotonic() if now is None else now))


def _metrics(origin: Origin, now: float) -> Iterator[str]:
    times = origin.timeline
    yield _metric("total", now - origin.arrived)
    if times.queued or times.tokenizing.seconds:
        yield _metric("preprocess", (times.queued or now) - origin.arrived)
    if times.media.seconds:
        yield _metric("media", times.media.seconds, "preprocess: media")
    if times.tokenizing.seconds:
        yield _metric("tokenize", times.tokenizing.seconds, "preprocess: chat template and tokens")
    if not times.scheduled:
        return
    yield _metric("queue", max(0.0, times.scheduled - times.queued))
    tokens = f"{times.prompt_tokens} tokens, {times.cached_tokens} cached"
    if times.first_token:
        yield _metric("prefill", times.first_token - times.scheduled, f"prefill: {tokens}")
        yield _metric("decode", times.last_token - times.first_token, f"decode: {times.output_tokens} tokens")
    else:
        yield _metric("inference", times.sent - times.scheduled, f"inference: {tokens}")


def _metric(name: str, seconds: float, description: str = "") -> str:
    text = f"{name};dur={seconds * 1e3:.1f}"
    return f'{text};desc="{description}"' if description else text

"""Exemplars: the id of a trace beside a latency, so that a dashboard leads from a slow request to what it did."""

from __future__ import annotations

import re

from quire.engine.client.origin import Origin

_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1  # flag of a trace that is recorded


def exemplar_of(origin: Origin) -> dict[str, str] | None:
    """Return the labels of the exemplar of a request; None if it is part of no trace that is recorded."""
    match = None if origin.traceparent is None else _TRACE_PARENT.fullmatch(origin.traceparent)
    if match is None or not int(match[2], 16) & _SAMPLED:
        return None
    return {"trace_id": match[1]}

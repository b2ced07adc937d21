"""The states of responses as they are stored and read again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.api.responses.run import ResponseRun
from quire.api.responses.store import StoredResponse

LEASE_SECONDS = 60.0  # a response is considered abandoned if its server does not renew its lease
UNFINISHED = ("queued", "in_progress")


def stored_state(run: ResponseRun) -> StoredResponse:
    """The state of a response, to be stored. After it could not be stored: only that."""
    response = run.events[-1]["response"] if run.finished else run.to_json()
    if run.unstored_reason is not None:
        return StoredResponse(owner=run.owner, response={**response, "output": []}, items=[])
    return StoredResponse(
        owner=run.owner,
        response=response,
        items=list(run.items),
        events=list(run.events) if run.body.stream or run.body.background else None,
        lease=0.0 if run.finished else time.time() + LEASE_SECONDS,
    )


def end_if_abandoned(stored: StoredResponse) -> None:
    """Mark a response as failed if no server generates it any more."""
    if stored.response["status"] not in UNFINISHED or stored.lease >= time.time():
        return
    message = "The server stopped while the response was generated, or could not store it."
    stored.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    if stored.events is not None:
        number = len(stored.events)
        stored.events.append({"type": "response.failed", "response": stored.response, "sequence_number": number})


def with_unique_ids() -> Callable[[Sequence[dict[str, Any]]], Iterator[dict[str, Any]]]:
    """A function that gives ids that have occurred before a number, always the same, so that they can be cursors."""
    counts: Counter[str] = Counter()
    seen: set[str] = set()

    def number(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in items:
            item_id = unique = item["id"]
            counts[item_id] += 1
            while unique in seen:
                unique = f"{item_id}-{counts[item_id]}"
                counts[item_id] += 1
            seen.add(unique)
            yield item if unique == item_id else {**item, "id": unique}

    return number

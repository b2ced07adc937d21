from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.ray.autoscaling import RUNNING, WAITING, by_sequences


def _context(running: list[float], waiting: list[float], queued: float = 0.0) -> Any:
    """What Ray tells a policy; bounds 1 and 8, 4 sequences in a replica."""
    return SimpleNamespace(
        config=SimpleNamespace(target_ongoing_requests=4.0),
        aggregated_metrics={RUNNING: dict(enumerate(running)), WAITING: dict(enumerate(waiting))},
        total_queued_requests=queued,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )


@pytest.mark.parametrize(
    ("context", "replicas"),
    [
        (_context([4.0], [0.0]), 1),
        (_context([4.0], [1.0]), 2),
        (_context([4.0, 4.0], [3.0, 1.0]), 3),
        (_context([1.0, 0.0], [0.0, 0.0]), 1),
        (_context([0.0], [0.0]), 1),
        (_context([4.0], [0.0], queued=5.0), 3),
        (_context([4.0], [1000.0]), 8),
    ],
)
def test_there_are_as_many_replicas_as_the_sequences_need(context: Any, replicas: int) -> None:
    assert by_sequences(context)[0] == replicas


def test_replicas_that_have_not_reported_yet_count_for_nothing() -> None:
    context = _context([], [])
    context.aggregated_metrics = None

    assert by_sequences(context)[0] == 1

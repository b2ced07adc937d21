"""The report: criteria, and a table with the worst bodies first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.hostile.session import MEMORY_MARGIN, Row

MAX_ITL_RATIO = 3.0
MAX_HEALTH_MS = 100.0


def as_json(row: Row, quiet: dict[str, float]) -> dict[str, Any]:
    """A row of the stored report; answers to the same body are summarized."""
    answers = [_summary(name, answers) for name, answers in zip(row.names, row.answers, strict=True)]
    values = {name: value for name, value in asdict(row).items() if name != "gaps"}
    return {**values, "answers": answers, "itl_ratio": ratio(row, quiet), "problems": row.problems}


def _summary(name: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "sent": len(answers),
        "statuses": sorted({int(answer["status"]) for answer in answers}),
        "seconds": max(answer["seconds"] for answer in answers),
        "bytes": max(answer["size"] for answer in answers),
        "problems": sorted({answer["problem"] for answer in answers if answer["problem"]}),
    }


def ratio(row: Row, quiet: dict[str, float]) -> float:
    """ITL p99 over its undisturbed value."""
    return row.itl["p99"] / quiet["p99"]


def criteria(rows: Sequence[Row], quiet: dict[str, float], end: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each criterion: whether it is met, its value, and what failed it.

    The ITL is judged over all rows together; rows that are above the limit by themselves are named beside it.
    """
    judged = [row for row in rows if not row.control]
    gaps = [gap for row in judged for gap in row.gaps]
    overall = statistics.quantiles(gaps, n=100, method="inclusive")[98] / quiet["p99"] if gaps else 0.0
    slow = [row for row in judged if ratio(row, quiet) >= MAX_ITL_RATIO]
    unhealthy = [row for row in judged if row.health_max >= MAX_HEALTH_MS]
    memory, held = end["memory_mb"], end["held"]
    added = memory["after"] - memory["before"]
    wrong = [row for row in judged if row.problems]
    stuck = [row for row in judged if row.recovery_seconds is None]
    return {
        "ITL p99 of all rows below 3 x undisturbed": {
            "met": overall < MAX_ITL_RATIO,
            "value": overall,
            "failed": [_name(row) for row in slow],
            "worst_row": max((ratio(row, quiet) for row in judged), default=0),
        },
        "/health within 100 ms": _criterion(unhealthy, max((row.health_max for row in judged), default=0)),
        "memory back to within 200 MB": {"met": added < MEMORY_MARGIN / 1e6, "value": added, "failed": []},
        "nothing held afterwards": {
            "met": held["all_places_free"] and not any(held[name] for name in held if name != "all_places_free"),
            "value": held,
            "failed": [_name(row) for row in stuck],
        },
        "2xx, 4xx or 503 in the right shape": _criterion(wrong, len(wrong)),
        "no tracebacks in the log": {"met": end["tracebacks"] == 0, "value": end["tracebacks"], "failed": []},
    }


def _criterion(failed: Sequence[Row], value: float) -> dict[str, Any]:
    return {"met": not failed, "value": value, "failed": [_name(row) for row in failed]}


def _name(row: Row) -> str:
    return " + ".join(row.names)


def table(rows: Sequence[Row], quiet: dict[str, float]) -> str:
    """All rows, worst first."""
    head = f"{'p99 ratio':>9} {'p99 ms':>7} {'max ms':>7} {'health':>7} {'max MB':>7} {'after':>6}  body: answers"
    lines = (
        f"{ratio(row, quiet):9.2f} {row.itl['p99']:7.1f} {row.itl['max']:7.0f} {row.health_max:7.0f} "
        f"{row.memory['max']:7.0f} {row.memory['after']:6.0f}  {line(row)}"
        for row in sorted(rows, key=lambda row: -ratio(row, quiet))
    )
    return "\n".join([head, *lines])


def line(row: Row) -> str:
    """Names, statuses and times of a row's answers, and what is wrong with them."""
    parts = [
        f"{name}: {'/'.join(str(s) for s in summary['statuses'])} in {summary['seconds']:.2f} s"
        for name, answers in zip(row.names, row.answers, strict=True)
        for summary in [_summary(name, answers)]
    ]
    text = "; ".join(parts) + ("  (control)" if row.control else "")
    return text + (f"  WRONG: {'; '.join(row.problems)}" if row.problems else "")


def verdicts(criteria: dict[str, dict[str, Any]]) -> str:
    """A line per criterion."""
    lines = []
    for name, about in criteria.items():
        failed = f"; failed by {len(about['failed'])}: {', '.join(about['failed'][:12])}" if about["failed"] else ""
        lines.append(f"{'pass' if about['met'] else 'FAIL'}  {name}: {about['value']}{failed}")
    return "\n".join(lines)

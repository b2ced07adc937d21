"""One table of the goals for GPUs, and what the reports in some folders say of each.

python -m benchmarks.gpu.summary FOLDER [FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGE = "llama-3-8b"  # the shape that most goals are about
_PEER_RATES = ("static_tokens_per_s_with_prefill", "continuous_tokens_per_s_with_prefill")
Results = dict[tuple[str, str], list[dict[str, Any]]]  # by shape and engine


@dataclass(frozen=True, slots=True)
class Goal:
    """A number to reach.

    Attributes:
        what: what it says.
        target: the number, and how measured ones compare to it if they reach it.
        find: what was measured; None: nothing.
        digits: after the point.
    """

    what: str
    reaches: Callable[[float, float], bool]
    target: float
    find: Callable[[Results], float | None]
    digits: int = 2


def find_row(results: Results, shape: str, engine: str, batch: int, context: int | None = None) -> dict[str, Any]:
    """The result of a case; empty if it was not measured, or failed. `context`: None for any."""
    rows = results.get((shape, engine), ())
    fit = (row for row in rows if row["batch"] == batch and context in (None, row["context"]) and "error" not in row)
    return next(fit, {})


def largest_gap(results: Results) -> float | None:
    """The largest gap between two decode steps of the large shape, in microseconds."""
    return max((row["gap_us"] for row in results.get((LARGE, "quire"), ()) if "gap_us" in row), default=None)


def ratio_to_peer(results: Results, shape: str) -> float | None:
    """Tokens per second of 64 requests, relative to transformers' best way."""
    peer = find_row(results, shape, "transformers", 64)
    row = find_row(results, shape, "quire", 64, peer.get("context"))
    rates = [peer[name] for name in _PEER_RATES if name in peer]
    return row["tokens_per_s_with_prefill"] / max(rates) if row and rates else None


def _of_large(name: str, batch: int, context: int | None = None) -> Callable[[Results], float | None]:
    return lambda results: find_row(results, LARGE, "quire", batch, context).get(name)


GOALS = (
    Goal("decode, batch 1: share of a copy's bandwidth, on weights", operator.ge, 0.80, _of_large("weights_share", 1)),
    Goal(
        "decode, batch 64 x 2,048: share of the roofline bound", operator.ge, 0.70,
        _of_large("decode_floor_share", 64, 2048),
    ),
    Goal(
        "prefill of 64 x 2,048: share of the rate of bfloat16 products", operator.ge, 0.55,
        _of_large("prefill_floor_share", 64, 2048),
    ),
    Goal("largest gap between two decode steps, in microseconds", operator.lt, 50, largest_gap, 1),
    Goal("64 requests: tokens/s relative to transformers' best", operator.ge, 3, lambda r: ratio_to_peer(r, LARGE)),
)  # fmt: skip


def read(folders: Sequence[Path]) -> Results:
    """The results of all reports of the engine, without quantization."""
    results: Results = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            report = json.loads(file.read_text(encoding="utf-8"))
            if "engine" in report and report.get("quantization", "none") == "none":
                results.setdefault((report["shape"], report["engine"]), []).extend(report["results"])
    return results


def table(results: Results) -> Iterator[str]:
    """The goals as lines of text: what, target, measured, verdict."""
    width = max(len(goal.what) for goal in GOALS)
    yield f"{'Llama-3-8B in bfloat16':{width}}  {'target':>8}  {'measured':>8}"
    for goal in GOALS:
        sign = "<" if goal.reaches is operator.lt else ">="
        target, measured = f"{sign} {goal.target:g}", goal.find(results)
        number = "-" if measured is None else f"{measured:.{goal.digits}f}"
        verdict = "not measured" if measured is None else "reached" if goal.reaches(measured, goal.target) else "MISSED"
        yield f"{goal.what:{width}}  {target:>8}  {number:>8}  {verdict}"


def cases(results: Results) -> Iterator[str]:
    """What was measured in each case, of all shapes."""
    for (shape, engine), rows in sorted(results.items()):
        for row in rows:
            case = f"{shape} {engine} {row['batch']} x {row['context']}:"
            yield " ".join(
                (case, *(f"{name}={value}" for name, value in row.items() if name not in ("batch", "context")))
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    results = read(parser.parse_args(arguments).folders)
    print("\n".join((*cases(results), "", *table(results))))


if __name__ == "__main__":
    main()

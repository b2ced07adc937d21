"""Keeps a run of the shared compare.py: medians and ratios, with what is needed to run it again.

    python -m benchmarks.peers RUN.json --out benchmarks/results/FILE.json quire=0.1.0 vllm=0.32.0 llama=0.3.36

A ratio is the median of the server that is named first over the best other's; servers that are not named are left out.
Repetitions that failed or had foreign CPU use do not
count, as in compare.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

FOREIGN_CORES = 0.25
HIGHER_IS_BETTER = {"out_tps": True, "tot_tps": True, "ttft_p50": False, "tpot_p50": False}
OF_THE_SERVER = ("startup_s", "peak_mb")

Key = tuple[str, str]  # work, metric


def medians(runs: list[dict[str, Any]]) -> dict[Key, dict[str, float]]:
    """Median of every metric, by server."""
    seen: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for metric in OF_THE_SERVER:
            seen["server", metric][run["server"]].append(run[metric])
        for row in run["results"]:
            if not row["failed"] and (row.get("foreign_cores") or 0) <= FOREIGN_CORES:
                for metric in HIGHER_IS_BETTER:
                    seen[row["workload"], metric][run["server"]].append(row[metric])
    return {key: {server: median(values) for server, values in row.items()} for key, row in seen.items()}


def ratio(row: dict[str, float], metric: str, ours: str) -> float | None:
    """Ours over the best other's, if both were measured."""
    others = [value for server, value in row.items() if server != ours]
    if ours not in row or not others:
        return None
    best = max(others) if HIGHER_IS_BETTER.get(metric, False) else min(others)
    return round(row[ours] / best, 3)


def report(run: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """What is kept of a run."""
    ours = next(iter(versions))
    kept = [one for one in run["runs"] if one["server"] in versions]
    rows = [
        {"work": work, "metric": metric, **row, "ratio": ratio(row, metric, ours)}
        for (work, metric), row in sorted(medians(kept).items())
    ]
    return {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "model": Path(run["model"]).name,
        "versions": versions,
        "ratio": f"{ours} / best other",
        "medians": rows,
    }


def table(kept: dict[str, Any]) -> str:
    """The medians as Markdown."""
    servers = list(kept["versions"])
    lines = [f"| work | metric | {' | '.join(servers)} | ratio |", "|---" * (len(servers) + 3) + "|"]
    for row in kept["medians"]:
        values = [f"{row[server]:,.5g}" if server in row else "-" for server in servers]
        shown = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(f"| {row['work']} | {row['metric']} | {' | '.join(values)} | {shown} |")
    return "\n".join(lines)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    """Convert and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the JSON that compare.py wrote")
    parser.add_argument("versions", nargs="+", metavar="NAME=VERSION", help="versions of the servers, ours first")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    versions = dict(text.split("=", 1) for text in options.versions)
    kept = report(json.loads(options.run.read_text(encoding="utf-8")), versions)
    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(kept))


if __name__ == "__main__":
    main()

"""Stores a run of the shared compare.py: medians and ratios, with the details needed to repeat it.

    python -m benchmarks.peers RUN.json --out benchmarks/results/FILE.json quire=0.1.0 vllm=0.32.0 llama=0.3.36

A ratio is the median of the first named server over that of the best other one. Servers that are not named are omitted.
Repetitions that failed, or with CPU use by other processes, are ignored, as in compare.py.
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
SERVER_METRICS = ("startup_s", "peak_mb")

Key = tuple[str, str]  # work, metric


def medians(runs: list[dict[str, Any]]) -> dict[Key, dict[str, float]]:
    """Return the median of every metric by server."""
    seen: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for metric in SERVER_METRICS:
            seen["server", metric][run["server"]].append(run[metric])
        for row in run["results"]:
            if not row["failed"] and (row.get("foreign_cores") or 0) <= FOREIGN_CORES:
                for metric in HIGHER_IS_BETTER:
                    seen[row["workload"], metric][run["server"]].append(row[metric])
    return {key: {server: median(values) for server, values in row.items()} for key, row in seen.items()}


def ratio(row: dict[str, float], metric: str, version: str) -> float | None:
    """Return our value over the best other server's, or None if either was not measured."""
    others = [value for server, value in row.items() if server != version]
    if version not in row or not others:
        return None
    best = max(others) if HIGHER_IS_BETTER.get(metric, False) else min(others)
    return round(row[version] / best, 3)


def report(run: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """Return the report of a run: medians and ratios, with date, machine and versions."""
    version = next(iter(versions))
    stored = [result for result in run["runs"] if result["server"] in versions]
    rows = [
        {"work": work, "metric": metric, **row, "ratio": ratio(row, metric, version)}
        for (work, metric), row in sorted(medians(stored).items())
    ]
    return {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "model": Path(run["model"]).name,
        "versions": versions,
        "ratio": f"{version} / best other",
        "medians": rows,
    }


def table(stored: dict[str, Any]) -> str:
    """Return the medians as a Markdown table."""
    servers = list(stored["versions"])
    lines = [f"| workload | metric | {' | '.join(servers)} | ratio |", "|---" * (len(servers) + 3) + "|"]
    for row in stored["medians"]:
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
    """Write the report and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="JSON output of compare.py")
    parser.add_argument("versions", nargs="+", metavar="NAME=VERSION", help="versions of the servers, ours first")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    versions = dict(text.split("=", 1) for text in options.versions)
    stored = report(json.loads(options.run.read_text(encoding="utf-8")), versions)
    options.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(table(stored))


if __name__ == "__main__":
    main()

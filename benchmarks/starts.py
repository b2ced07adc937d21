"""Compares starts of two builds of Quire, in turns: a shared machine's speed changes over minutes.

    python -m benchmarks.starts MODEL old=PATH new=PATH --runs 7 --out FILE.json -- --dtype bfloat16

PATH is a checkout with compiled kernels. What follows `--` goes to both servers. Each build starts once before it is
measured, so that files, bytecode and caches are there. CPU time depends less on other processes than the seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median

from quire.app.bench.startup import FIGURES, spread_of, timed_start

_TIMEOUT = 900.0  # the first start of a large file packs its weights


def main() -> None:
    """Measure and write the results."""
    options = _parsed()
    builds = dict(build.split("=", 1) for build in options.builds)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    for number in range(options.runs + 1):
        for name, checkout in builds.items():
            environment = {**os.environ, "PYTHONPATH": checkout, "HF_HUB_OFFLINE": "1"}
            row = timed_start([str(options.model), *options.flags], _TIMEOUT, cwd=checkout, env=environment)
            if number:
                rows[name].append(row)
    old, new = rows
    result = {
        "command": f"python -m benchmarks.starts {options.model.name} {old}=PATH {new}=PATH --runs {options.runs}",
        "figures": {
            name: {figure: spread_of([row[figure] for row in build]) for figure in FIGURES}
            for name, build in rows.items()
        },
        "ratios": {figure: _ratio(rows[old], rows[new], figure) for figure in FIGURES},
        "runs": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"figures": result["figures"], "ratios": result["ratios"]}, indent=1))


def _ratio(old: list[dict[str, float]], new: list[dict[str, float]], figure: str) -> float:
    """The median of new by old, of starts that followed each other."""
    return median(after[figure] / before[figure] for before, after in zip(old, new, strict=True))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("builds", nargs=2, metavar="NAME=PATH")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="of both servers, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()

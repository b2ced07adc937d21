"""What hostile requests do to 16 ordinary streams, to /health and to the memory of a server on the bundled model.

    python -m benchmarks.hostile --out benchmarks/results/FILE.json

Each body is sent again and again for three seconds, and so are the requests of crowds: many clients at the same time.
Then several bodies are sent at a time. Every row compares the time between chunks of the streams (ITL) with that before
the first body. A server that ends is started again. `--only` selects bodies by a part of their names, `--list` prints
these. The exit status is 0 if all criteria are met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.hostile import audio, grammars, pooling, sizes, texts, tool_servers
from benchmarks.hostile.crowds import crowds
from benchmarks.hostile.report import as_json, criteria, line, ratio, table, verdicts
from benchmarks.hostile.session import Disturbance, Options, Row, Session


def select(only: Sequence[str]) -> list[Disturbance]:
    """All bodies and crowds, or those with one of these texts in their names. A new kind is another file here."""
    files = (grammars, sizes, texts, pooling, audio, tool_servers)
    everything: list[Disturbance] = [*(body for file in files for body in file.bodies()), *crowds()]
    return [hostile for hostile in everything if not only or any(part in hostile.name for part in only)]


def groups(bodies: Sequence[Disturbance], at_once: int) -> Iterator[list[Disturbance]]:
    """Each body alone, then all of them in random groups, which are the same in every run."""
    yield from ([hostile] for hostile in bodies)
    mixed = [hostile for hostile in bodies if not hostile.control]
    random.Random(0).shuffle(mixed)
    for start in range(0, len(mixed) if at_once > 1 else 0, at_once):
        yield mixed[start : start + at_once]


def run(options: Options, bodies: Sequence[Disturbance], at_once: int, folder: Path) -> dict[str, Any]:
    """Send everything, and return the report."""
    rows: list[Row] = []
    with ExitStack() as stack:
        session = stack.enter_context(Session(options, folder))
        quiet = session.quiet
        print(f"undisturbed: {quiet}", flush=True)
        for group in groups(bodies, at_once):
            if session.server.ended is not None:
                stack.close()
                session = stack.enter_context(Session(options, folder))
            row = session.disturb(group)
            rows.append(row)
            print(
                f"{ratio(row, quiet):6.2f} x, max {row.itl['max']:5.0f} ms, health {row.health_max:5.0f} ms, "
                f"{row.memory['max']:5.0f}, then {row.memory['after']:5.0f} MB  {line(row)}",
                flush=True,
            )
        if session.server.ended is not None:
            stack.close()
            session = stack.enter_context(Session(options, folder))
        quiet_after = session.measure_quiet()
        end = session.finish()
    print(table(rows, quiet), flush=True)
    return {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "streams": options.streams,
        "undisturbed": quiet,
        "undisturbed_afterwards": quiet_after,
        "criteria": criteria(rows, quiet, end),
        "end": end,
        "rows": [as_json(row, quiet) for row in sorted(rows, key=lambda row: -ratio(row, quiet))],
    }


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def main() -> int:
    """Run the benchmark, print and store the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for which each body is sent")
    parser.add_argument("--quiet-seconds", type=float, default=15.0, help="seconds without hostile bodies")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until an answer is given up")
    parser.add_argument("--at-once", type=int, default=6, help="bodies that are sent at the same time; 1: none")
    parser.add_argument("--max-memory", type=float, default=8.0, help="gigabytes at which the server is killed")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--serve-args", default="", help="further flags of quire serve")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    bodies = select(chosen.only)
    if chosen.list:
        print("\n".join(hostile.name for hostile in bodies))
        return 0
    with tempfile.TemporaryDirectory() as folder, tool_servers.tool_servers() as flags:
        options = Options(
            streams=chosen.streams,
            seconds=chosen.seconds,
            quiet_seconds=chosen.quiet_seconds,
            timeout=chosen.timeout,
            max_memory=int(chosen.max_memory * 1e9),
            port=chosen.port,
            flags=(*flags, *chosen.serve_args.split()),
        )
        report = run(options, bodies, chosen.at_once, Path(folder))
    print(verdicts(report["criteria"]))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(about["met"] for about in report["criteria"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compares `quire render` with `quire serve` of the same model, in turns: their starts, their memory, and renders.

    python -m benchmarks.render MODEL --runs 5 --out FILE.json

Each starts once before it is measured, so that files, bytecode and caches are there. Memory is that of the process and
its children (PSS, which counts shared pages once), after the renders.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.processes import memory_of
from quire.app.bench.server_process import serve_command, started_server
from quire.app.bench.startup import free_port, spread_of, usage_of, wait_until_ready

_TIMEOUT = 600.0
_FIGURES = ("ready_s", "cpu_s", "memory_mb", "renders_per_s")
_COMMANDS = ("serve", "render")


def main() -> None:
    """Measure and write the results."""
    options = _parsed()
    rows: dict[str, list[dict[str, float]]] = {command: [] for command in _COMMANDS}
    for number in range(options.runs + 1):
        for command in _COMMANDS:
            row = _measured(command, options.model, options.renders)
            if number:
                rows[command].append(row)
    result = {
        "command": f"python -m benchmarks.render {Path(options.model).name} --runs {options.runs}",
        "figures": {
            command: {figure: spread_of([row[figure] for row in rows[command]]) for figure in _FIGURES}
            for command in _COMMANDS
        },
        "ratios": {
            figure: median(
                render[figure] / serve[figure] for serve, render in zip(rows["serve"], rows["render"], strict=True)
            )
            for figure in _FIGURES
        },
        "runs": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"figures": result["figures"], "ratios": result["ratios"]}, indent=1))


def _measured(command: str, model: str, renders: int) -> dict[str, float]:
    port = free_port()
    words = serve_command(model, "--port", str(port), command=command)
    started = time.perf_counter()
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started_server(words, **silent) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        wait_until_ready(client, process, started + _TIMEOUT)
        ready = time.perf_counter() - started
        cpu = usage_of(process.pid)["cpu_s"]
        speed = _renders_per_second(client, renders)
        return {"ready_s": ready, "cpu_s": cpu, "memory_mb": memory_of(process.pid), "renders_per_s": speed}


def _renders_per_second(client: httpx.Client, count: int) -> float:
    """Renders of different chats of about 200 words, one after another; the first ones are not counted."""
    begun = time.perf_counter()
    for number in range(-10, count):
        if not number:
            begun = time.perf_counter()
        message = {"role": "user", "content": f"Question {number}: " + "what is the weather like in spring? " * 25}
        client.post("/v1/chat/completions/render", json={"messages": [message]}).raise_for_status()
    return count / (time.perf_counter() - begun)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--renders", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()

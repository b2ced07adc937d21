"""Memory of servers after one request, beside the size of the model's file.

    python -m benchmarks.memory FILE.gguf --out RESULT.json quire='COMMAND' llama='COMMAND'

Servers are started one after another. Each answers one request of random tokens (`--prompt`, `--tokens`); then the
proportional set sizes of all its processes are added up: pages that several processes map count once, those of mapped
files as far as they are in memory. `bound_mb` is 1.15 times the file and 500 MB. Megabytes are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.gguf_peers import GREEDY, Client, wait_for_model
from benchmarks.processes import Server

_FILE_SHARE, _MORE_MB = 1.15, 500.0


def memory_after_one_request(command: str, port: int, label: str, options: argparse.Namespace) -> float:
    """Return the megabytes of a server that has answered a request."""
    with Server(command, port, options.out.with_suffix(f".{label}.log"), model=options.model) as server:
        client = Client(server.url, wait_for_model(server, options.start_timeout), 0, GREEDY)
        asyncio.run(client.seconds(1, options.prompt, options.tokens))
        return round(server.memory() * 2**20 / 1e6, 1)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the request's prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of its answer")
    parser.add_argument("--start-timeout", type=float, default=120)
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    commands = dict(text.split("=", 1) for text in options.servers)
    runs: dict[str, list[float]] = {label: [] for label in commands}
    for number in range(options.runs):
        for index, (label, command) in enumerate(commands.items()):
            port = options.port + number * len(commands) + index
            runs[label].append(memory_after_one_request(command, port, label, options))
            print(label, runs[label][-1], flush=True)
    file_mb = options.model.stat().st_size / 1e6
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "request": {"prompt": options.prompt, "tokens": options.tokens},
        "file_mb": round(file_mb, 1),
        "bound_mb": round(_FILE_SHARE * file_mb + _MORE_MB, 1),
        "memory_mb": {label: median(values) for label, values in runs.items()},
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

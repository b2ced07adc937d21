"""Time to the first token of a long prompt that a restarted server computes, reads from the disk, or has in memory.

    python -m benchmarks.cpu.tier MODEL --out benchmarks/results/FILE.json

Each round starts a server without a second tier and one whose folder has the blocks. Both answer the prompt with one
token, then once more with the blocks in memory. Prompts are different words in each round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.processes import Server

WORDS = ("the", "server", "reads", "a", "long", "prompt", "and", "answers", "with", "one", "word", "of", "its", "own")
PATIENCE = 300.0


def prompt_of(number: int, words: int) -> str:
    """Return a prompt that no other number has."""
    rng = Random(number)
    return f"{number} " + " ".join(rng.choice(WORDS) for _ in range(words))


def wait_for(url: str, path: str) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if httpx.get(url.removesuffix("/v1") + path).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError("the server does not answer")


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    page = httpx.get(url.removesuffix("/v1") + "/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"quire:{name}{{"))


def first_token(url: str, prompt: str, **fields: Any) -> dict[str, float]:
    """Return the seconds until the first token, and how many tokens of the prompt were cached. `fields`: more ones."""
    started = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE).raise_for_status().json()
    seconds = time.perf_counter() - started
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {"seconds": seconds, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def command_of(model: str, more: str) -> str:
    """Return the command of a server; its port follows."""
    return f"{shlex.quote(sys.executable)} -m quire serve {shlex.quote(model)} --port {{port}} {more}"


def run_round(options: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Return what both servers measured, after one that has saved the prompt."""
    tier = f"--kv-offloading-disk-size 10 --kv-offloading-path {shlex.quote(str(folder / 'kv'))} {options.serve_args}"
    prompt, log = prompt_of(number, options.words), folder / "log"
    with Server(command_of(options.model, tier), options.port, log) as server:
        wait_for(server.url, "/health")
        first_token(server.url, prompt_of(number + 1000, 40))  # what a process does once
        first_token(server.url, prompt)
        while metric(server.url, "kv_offload_unwritten_blocks"):
            time.sleep(0.05)
        written = metric(server.url, "kv_offload_store_bytes_total")
    measured: dict[str, Any] = {"written_bytes": written}
    for name, more in {"computed": options.serve_args, "read": tier}.items():
        with Server(command_of(options.model, more), options.port, log) as server:
            wait_for(server.url, "/health")
            first_token(server.url, prompt_of(number + 2000, 40))
            measured[name] = first_token(server.url, prompt)
            measured[f"{name}_then_in_memory"] = first_token(server.url, prompt)
            if name == "read":
                measured["load_seconds"] = metric(server.url, "kv_offload_load_time_total")
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=9400)
    parser.add_argument("--serve-args", default="", help="further flags of the servers")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        rounds = [run_round(options, Path(name), number) for number in range(options.rounds)]
    report = {
        "date": date.today().isoformat(),
        "model": Path(options.model).name,
        "serve_args": options.serve_args,
        "rounds": rounds,
        "read_over_computed": median(each["read"]["seconds"] / each["computed"]["seconds"] for each in rounds),
        "in_memory_over_computed": median(
            each["computed_then_in_memory"]["seconds"] / each["computed"]["seconds"] for each in rounds
        ),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""First token of a long prompt that a server computes or whose KV blocks it reads from another one; gaps of a stream.

    python -m benchmarks.cpu.transfer MODEL --out benchmarks/results/FILE.json

In each round a prefiller computes a prompt, and a decoder answers it with one token; then the decoder computes another
prompt of the same words' number itself. Both times it generates a stream meanwhile, whose largest gap between two
tokens is measured. What the prefiller takes is measured as well: with two servers it is spent elsewhere, not saved.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.cpu.tier import PATIENCE, command_of, first_token, metric, prompt_of, wait_for
from benchmarks.processes import Server

_STREAMED = 400  # tokens of the stream, more than it gets while it is measured


class Stream:
    """A stream that a server generates while something else is measured."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._gaps: list[float] = []
        self._begun, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Stream:
        self._thread.start()
        if not self._begun.wait(PATIENCE):
            raise TimeoutError("the stream does not begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def largest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max(self._gaps)

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": _STREAMED, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._url}/completions", json=body, timeout=PATIENCE) as answer:
            last = 0.0
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last:
                    self._gaps.append(now - last)
                    self._begun.set()
                last = now
                if self._is_over.is_set():
                    return


def prefill(url: str, prompt: str) -> dict[str, Any]:
    """Return what a decoder needs to know of a prompt."""
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE).raise_for_status()
    kept: dict[str, Any] = answer.json()["kv_transfer_params"]
    return kept


def run_round(prefiller: str, decoder: str, number: int, words: int) -> dict[str, Any]:
    """Return what was measured."""
    prompt, other = prompt_of(number + 1000, words), prompt_of(number + 2000, words)
    started = time.perf_counter()
    kept = prefill(prefiller, prompt)
    measured: dict[str, Any] = {"prefill_seconds": time.perf_counter() - started}
    before = metric(decoder, "nixl_xfer_time_seconds_sum"), metric(decoder, "nixl_bytes_transferred_sum")
    with Stream(decoder) as stream:
        measured["read"] = first_token(decoder, prompt, kv_transfer_params=kept)
    measured["read"]["largest_gap"] = stream.largest_gap
    measured["transfer_seconds"] = metric(decoder, "nixl_xfer_time_seconds_sum") - before[0]
    measured["transfer_bytes"] = metric(decoder, "nixl_bytes_transferred_sum") - before[1]
    with Stream(decoder) as stream:
        measured["computed"] = first_token(decoder, other)
    measured["computed"]["largest_gap"] = stream.largest_gap
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=9400, help="and the next one")
    parser.add_argument("--serve-args", default="", help="further flags of the servers")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        urls = list[str]()
        for index, role in enumerate(("kv_producer", "kv_consumer")):
            config = json.dumps({"kv_connector": "QuireConnector", "kv_role": role, "kv_port": 0})
            more = f"--kv-transfer-config {shlex.quote(config)} {options.serve_args}"
            command = command_of(options.model, more)
            server = stack.enter_context(Server(command, options.port + index, Path(name) / role))
            wait_for(server.url, "/health")
            urls.append(server.url)
        warm = prompt_of(5000, 40)  # what a process does once
        first_token(urls[1], warm, kv_transfer_params=prefill(urls[0], warm))
        rounds = [run_round(urls[0], urls[1], number, options.words) for number in range(options.rounds)]
    report = {
        "date": date.today().isoformat(),
        "model": Path(options.model).name,
        "serve_args": options.serve_args,
        "rounds": rounds,
        "read_over_computed": median(each["read"]["seconds"] / each["computed"]["seconds"] for each in rounds),
        "largest_gap_read_over_computed": median(
            each["read"]["largest_gap"] / each["computed"]["largest_gap"] for each in rounds
        ),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compares two builds of Quire under the workloads of the shared load.py, in alternation on the same machine.

Both servers run throughout, and one of them at a time is loaded, so that a turn of one is followed by the same turn of
the other: the speed of a shared machine changes over minutes. Every turn has its own prompts, so no prefix cache helps.

    python -m benchmarks.before_after MODEL old=PATH new=PATH --load LOAD.PY --out FILE.json -- --dtype bfloat16
    python -m benchmarks.before_after EMBEDDER old=PATH new=PATH --embed --out FILE.json
    python -m benchmarks.before_after WHISPER old=PATH new=PATH --transcribe FILE.wav --out FILE.json

With --embed a turn is one request with 256 texts, with --transcribe one with a file of audio; a ratio is then that of
wall times. PATH is a checkout with compiled kernels. What follows `--` goes to both servers; `--flags-of NAME FLAGS`
goes to one of them, because a flag may have had another name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.processes import session_seconds

FOREIGN_CORES = 0.25  # of other processes: a turn with more is repeated
METRICS = ("out_tps", "ttft_p50", "tpot_p50")


class Server:
    """A build of Quire that serves a model on a port."""

    def __init__(self, name: str, checkout: Path, model: Path, port: int, flags: list[str]) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "quire", "serve", str(model), "--port", str(port), *flags]
        self._process = subprocess.Popen(
            [*command, "--served-model-name", "bench"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Return when the server answers; raises RuntimeError if it ends before."""
        while self._process.poll() is None:
            try:
                httpx.get(self.url + "/health", timeout=5).raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError(f"the server of {self.name} ended with code {self._process.returncode}")

    def run(self, load: Path, model: Path, workload: str, scale: float, seed: str) -> dict[str, Any]:
        """Return the result of one repetition of a workload."""
        command = [sys.executable, str(load), "--base-url", self.url, "--model", "bench", "--tokenizer", str(model)]
        command += [
            "--workload",
            workload,
            "--repeat",
            "1",
            "--scale",
            str(scale),
            "--seed",
            seed,
            "--wait-quiet",
            "10",
        ]
        output = subprocess.run(
            [*command, "--sid", str(self._process.pid)], check=True, capture_output=True, text=True
        ).stdout
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        if result["failed"]:
            raise RuntimeError(f"{self.name}, {workload}: {result['errors']}")
        return result

    def request(self, post: Callable[[httpx.Client, int], httpx.Response], turn: int) -> dict[str, Any]:
        """Return the wall and processor time of the request of a turn."""
        processor = self._processor_seconds()
        begin = time.perf_counter()
        with httpx.Client(base_url=self.url, timeout=600) as client:
            post(client, turn).raise_for_status()
        wall = time.perf_counter() - begin
        return {"wall_s": round(wall, 3), "cpu_s": round(self._processor_seconds() - processor, 2)}

    def _processor_seconds(self) -> float:
        return session_seconds(self._process.pid)

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def alternate(servers: list[Server], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of all turns; the order of the servers changes from turn to turn."""
    turns: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for workload in options.workloads:
            results: dict[str, Any] = {}
            for server in servers if turn % 2 == 0 else servers[::-1]:
                for attempt in range(3):
                    seed = f"{turn}-{attempt}"
                    results[server.name] = server.run(options.load, options.model, workload, options.scale, seed)
                    if results[server.name]["foreign_cores"] <= FOREIGN_CORES:
                        break
            rows = {name: {metric: result[metric] for metric in METRICS} for name, result in results.items()}
            old, new = (rows[server.name]["out_tps"] for server in servers)
            turns.append({"workload": workload, **rows, "ratio": round(new / old, 3)})
            print(turns[-1], flush=True)
    return turns


def alternate_requests(
    servers: list[Server], name: str, turns: int, post: Callable[[httpx.Client, int], httpx.Response]
) -> list[dict[str, Any]]:
    """Return the results of all turns with a request; `post` gets the number of the turn."""
    for server in servers:
        server.request(post, -1)
    rows = []
    for turn in range(turns):
        order = servers if turn % 2 == 0 else servers[::-1]
        results = {server.name: server.request(post, turn) for server in order}
        old, new = (results[server.name]["wall_s"] for server in servers)
        rows.append({"workload": name, **results, "ratio": round(old / new, 3)})
        print(rows[-1], flush=True)
    return rows


def embed(client: httpx.Client, turn: int) -> httpx.Response:
    """Send texts of 8 to 400 words; those of each turn differ."""
    rng = random.Random(turn)
    words = ["river", "stone", "engine", "letter", "window", "forest", "number", "market", "silver", "garden"]
    texts = [" ".join(rng.choices(words, k=rng.randint(8, 400))) for _ in range(256)]
    return client.post("/v1/embeddings", json={"model": "bench", "input": texts, "truncate_prompt_tokens": -1})


def transcribe(client: httpx.Client, turn: int, file: Path) -> httpx.Response:
    """Send a file of audio; whisper computes all of it in each turn."""
    content = file.read_bytes()
    fields = {"model": "bench", "language": "en", "temperature": "0"}
    return client.post("/v1/audio/transcriptions", data=fields, files={"file": (f"{turn}.wav", content)})


def main() -> None:
    """Run both servers and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("builds", nargs=2, metavar="NAME=CHECKOUT", help="the build before, then the one after")
    parser.add_argument("--load", type=Path, help="the shared load.py")
    parser.add_argument("--embed", action="store_true", help="send texts to embed instead")
    parser.add_argument("--transcribe", type=Path, help="send this file of audio instead")
    parser.add_argument("--workloads", nargs="*", default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flags-of", nargs=2, action="append", default=[], metavar=("NAME", "FLAGS"))
    arguments, flags = sys.argv[1:], []
    if "--" in arguments:
        arguments, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = parser.parse_args(arguments)
    builds = [text.split("=", 1) for text in options.builds]
    flags_of = {name: shlex.split(text) for name, text in options.flags_of}
    servers = []
    try:
        for number, (name, checkout) in enumerate(builds):
            all_flags = [*flags, *flags_of.get(name, [])]
            servers.append(Server(name, Path(checkout).resolve(), options.model, options.port + number, all_flags))
            servers[-1].wait_ready()
        if options.embed:
            turns = alternate_requests(servers, "embed", options.turns, embed)
        elif options.transcribe:
            turns = alternate_requests(
                servers, "transcribe", options.turns, partial(transcribe, file=options.transcribe)
            )
        else:
            turns = alternate(servers, options)
    finally:
        for server in servers:
            server.stop()
    names = dict.fromkeys(turn["workload"] for turn in turns)
    ratios = {name: [turn["ratio"] for turn in turns if turn["workload"] == name] for name in names}
    medians = {name: round(median(row), 3) for name, row in ratios.items()}
    print(options.model.name, flags, medians)
    report = {"date": date.today().isoformat(), "model": options.model.name, "flags": flags, "scale": options.scale}
    if options.out:
        options.out.write_text(
            json.dumps({**report, "ratio": medians, "turns": turns}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

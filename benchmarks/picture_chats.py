"""Concurrent chats with pictures at servers with OpenAI's API: throughput and time to first token, in alternation.

    python -m benchmarks.picture_chats MODEL --out FILE.json quire='COMMAND' vllm='COMMAND' llama='COMMAND'

Each server runs alone: first, second, first, second. In commands {model}, {name} and {port} stand for the folder of the
model, the name that requests have, and the port. A server is loaded when it has answered a first chat. All of them get
the same pictures, JPEG files of noise of low frequency, each of which is sent once, so that no cache helps. A ratio is
the first server's median over the best other one's; repetitions with CPU use by other processes are marked and ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.processes import Server, busy_seconds
from quire.app.bench.load import Send, request_body, send_all, stream_answer
from quire.app.bench.report import summarize
from quire.config.commands import BenchServe
from tests.support.pictures import encoded

NAME = "bench"
FOREIGN_CORES = 0.25  # of other processes: a repetition with more is ignored
HIGHER_IS_BETTER = {"requests_per_s": True, "output_tokens_per_s": True, "ttft_p50_ms": False, "ttft_p99_ms": False}


def wait_until_it_answers(server: Server, body: dict[str, Any], seconds: float) -> None:
    """Send a chat until it is answered; raises RuntimeError if the server refuses it, ends, or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.check_running()
        try:
            response = httpx.post(f"{server.url}/chat/completions", json=body, timeout=600)
        except httpx.TransportError:  # it does not listen yet
            time.sleep(0.5)
            continue
        if response.status_code == httpx.codes.OK:
            return
        if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # llama-server's while it loads
            raise RuntimeError(f"it answers {response.status_code}: {response.text[:300]}")
        time.sleep(0.5)
    raise RuntimeError(f"no answer within {seconds:.0f} s")


def picture(seed: int, edge: int) -> str:
    """Return the data URL of a picture."""
    noise = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    content = encoded(Image.fromarray(noise).resize((edge, edge), Image.Resampling.BICUBIC), "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def parts(seed: int, edge: int) -> list[dict[str, Any]]:
    """Return the parts of a message with a picture of its own."""
    return [
        {"type": "image_url", "image_url": {"url": picture(seed, edge)}},
        {"type": "text", "text": f"Describe picture {seed} in a few sentences."},
    ]


def load(server: Server, settings: BenchServe, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured while the requests were answered."""
    left = iter(bodies)

    def prepare() -> Send:
        body = next(left)
        return lambda session: stream_answer(session, settings, body)

    before = busy_seconds() - server.cpu_seconds() - time.process_time()
    result = asyncio.run(send_all(settings, random.Random(0), prepare, lambda _: None))
    foreign = busy_seconds() - server.cpu_seconds() - time.process_time() - before
    figures = summarize(result, settings, NAME)
    ttft = figures["ttft_ms"] or {"p50": float("nan"), "p99": float("nan")}
    return {
        "requests_per_s": round(figures["requests_per_second"], 4),
        "output_tokens_per_s": round(figures["output_tokens_per_second"], 2),
        "ttft_p50_ms": round(ttft["p50"], 1),
        "ttft_p99_ms": round(ttft["p99"], 1),
        "prompt_tokens": figures["prompt_tokens"],
        "output_tokens": figures["output_tokens"],
        "completed": figures["completed"],
        "errors": figures["errors"],
        "foreign_cores": round(max(0.0, foreign) / figures["seconds"], 2),
    }


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the rows of all repetitions."""
    rows = []
    servers = dict(text.split("=", 1) for text in options.servers)
    for round_number in range(options.rounds):
        for index, (label, command) in enumerate(servers.items()):
            port = options.port + index + round_number * len(servers)
            settings = BenchServe(
                url=f"http://127.0.0.1:{port}/v1",
                endpoint="chat",
                concurrency=options.concurrency,
                num_requests=options.requests,
                output_len=options.output_len,
                timeout=3600,
            )
            first, *bodies = (
                request_body(settings, NAME, parts(round_number * 1000 + seed, options.edge))
                for seed in range(options.requests + 1)
            )
            log = options.out.with_suffix(f".{label}.log")
            with Server(command, port, log, model=options.model, name=NAME) as server:
                started = time.monotonic()
                try:
                    wait_until_it_answers(server, first, options.start_timeout)
                except RuntimeError as error:  # the others are measured all the same
                    rows.append({"server": label, "errors": str(error)})
                else:
                    startup = round(time.monotonic() - started, 1)
                    rows.append({"server": label, "startup_s": startup, **load(server, settings, bodies)})
            say(str(rows[-1]))
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median of each metric by server, without repetitions that failed or were disturbed."""
    valid = [row for row in rows if not row["errors"] and row["foreign_cores"] <= FOREIGN_CORES]
    return {
        metric: {
            label: median(row[metric] for row in valid if row["server"] == label)
            for label in dict.fromkeys(row["server"] for row in valid)
        }
        for metric in HIGHER_IS_BETTER
    }


def ratios(by_metric: dict[str, dict[str, float]], first: str) -> dict[str, float]:
    """Return the first server's median over that of the best other one."""
    compared = {}
    for metric, row in by_metric.items():
        others = [value for label, value in row.items() if label != first]
        if first in row and others:
            best = max(others) if HIGHER_IS_BETTER[metric] else min(others)
            compared[metric] = round(row[first] / best, 3)
    return compared


def main() -> None:
    """Measure, print the medians and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", help="ours first")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--edge", type=int, default=512, help="of the pictures, in pixels")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = measure(options, lambda line: print(line, flush=True))
    by_metric = medians(rows)
    first = options.servers[0].partition("=")[0]
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        **{name: getattr(options, name) for name in ("concurrency", "requests", "output_len", "edge")},
        "medians": by_metric,
        "ratio": ratios(by_metric, first),
        "rows": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: report[name] for name in ("medians", "ratio")}, indent=1))


if __name__ == "__main__":
    main()

"""Quantized weights at servers with OpenAI's API, in alternation: decoding alone, 16 streams, and long prompts.

    python -m benchmarks.gguf_peers FILE.gguf --out RESULT.json quire='COMMAND' llama='COMMAND'
    python -m benchmarks.gguf_peers FOLDER --out RESULT.json quire='COMMAND' vllm='COMMAND'

All servers run at the same time, and are loaded in turn; the others wait meanwhile. In commands {model} and {port}
stand for the GGUF file, or the folder of safetensors files, and the port. Prompts are random tokens, so that no cache
helps, and requests are streamed:

- decode: one stream; the time of 128 more tokens than one (`--decoded`),
- streams: 16 requests at once of 32 tokens, 64 tokens out; output tokens per second of all,
- prompts: 1,024 tokens and one token out, twice (`--long-prompts`); prompt tokens per second.

Bandwidth is that of reading memory larger than caches with as many threads as cores, before and after each load: the
median of reads for a second, as tokens too are counted over slow and fast moments of a shared machine. A ratio
is the first server's rate over the best other one's in the same round, the median of all rounds. A floor share is the
time of reading the file's matrices once, over that of a token. Loads beside other busy processes are ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
from gguf import GGUFReader
from safetensors import safe_open

from benchmarks.cpu.limits import READ_BYTES, MemoryRead, timed
from benchmarks.processes import Server, busy_seconds, session_seconds

TOKENS = range(1000, 15000)  # that prompts are made of: usual ones in all vocabularies
GREEDY = {"temperature": 0}
LOADS = ("decode", "streams", "prompts")
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 16, 32, 64
DECODED, LONG_PROMPT, LONG_PROMPTS = 128, 1024, 2
READS = 30  # of memory, for its bandwidth
FOREIGN_CORES = 0.25


def wait_for_model(server: Server, seconds: float) -> str:
    """Wait until a server answers, and return its model's name; raises RuntimeError if it ends, or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.check_running()
        with suppress(httpx.TransportError):
            response = httpx.get(f"{server.url}/models")
            if response.status_code == httpx.codes.OK:
                return str(response.json()["data"][0]["id"])
        time.sleep(0.2)
    raise RuntimeError(f"no answer within {seconds:.0f} s")


class Client:
    """Sends requests of random tokens to a server."""

    def __init__(self, url: str, model: str, seed: int, sampling: dict[str, Any]) -> None:
        self._url, self._model, self._random = url, model, random.Random(seed)
        self._sampling = sampling

    async def seconds(self, requests: int, prompt: int, tokens: int) -> float:
        """Return the seconds until some requests, sent at once, are answered."""
        bodies = [
            {
                "model": self._model,
                "prompt": self._random.choices(TOKENS, k=prompt),
                "max_tokens": tokens,
                **self._sampling,
                "ignore_eos": True,
                "stream": True,
            }
            for _ in range(requests)
        ]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            started = time.perf_counter()
            await asyncio.gather(*(self._send(session, body) for body in bodies))
            return time.perf_counter() - started

    async def _send(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"{self._url}/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    async def measure(self, load: str, decoded: int, long_prompts: int) -> float:
        """Return the tokens per second of a load; see the options."""
        if load == "decode":
            first = await self.seconds(1, STREAM_PROMPT, 1)
            return decoded / (await self.seconds(1, STREAM_PROMPT, 1 + decoded) - first)
        if load == "streams":
            return STREAMS * STREAM_TOKENS / await self.seconds(STREAMS, STREAM_PROMPT, STREAM_TOKENS)
        return LONG_PROMPT / median([await self.seconds(1, LONG_PROMPT, 1) for _ in range(long_prompts)])


def bandwidth() -> float:
    """Return bytes per second of reading memory, in the median."""
    return READ_BYTES / timed(MemoryRead(), READS)[1]


def token_bytes(model: Path) -> int:
    """Return the bytes that a token at batch size 1 reads: all matrices, an embedding only where it is the head too."""
    if model.is_dir():
        sizes, head, table = _folder_tensors(model), "lm_head.", "model.embed_tokens.weight"
    else:
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(model).tensors}
        head, table = "output.", "token_embd.weight"
    tied = not any(name.startswith(head) for name in sizes)
    return sum(size for name, size in sizes.items() if tied or name != table)


def _folder_tensors(folder: Path) -> dict[str, int]:
    """Return the bytes of all tensors by name."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return sizes


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the rows of all rounds."""
    commands = dict(text.split("=", 1) for text in options.servers)
    rows = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for index, (label, command) in enumerate(commands.items()):
            log = options.out.with_suffix(f".{label}.log")
            servers[label] = stack.enter_context(Server(command, options.port + index, log, model=options.model))
        clients = {
            label: Client(server.url, wait_for_model(server, options.start_timeout), seed, options.sampling)
            for seed, (label, server) in enumerate(servers.items())
        }
        for client in clients.values():  # what a first request costs
            asyncio.run(client.seconds(2, STREAM_PROMPT, 4))
        read = bandwidth()
        for number in range(options.rounds):
            for load in options.loads:
                for label, client in clients.items():
                    before = busy_seconds() - servers[label].cpu_seconds() - session_seconds(os.getsid(0))
                    started = time.perf_counter()
                    rate = asyncio.run(client.measure(load, options.decoded, options.long_prompts))
                    foreign = busy_seconds() - servers[label].cpu_seconds() - session_seconds(os.getsid(0)) - before
                    seconds, read_before, read = time.perf_counter() - started, read, bandwidth()
                    row = {
                        "round": number,
                        "load": load,
                        "server": label,
                        "tokens_per_s": round(rate, 2),
                        "read_gb_per_s": round((read_before + read) / 2e9, 2),
                        "foreign_cores": round(max(0.0, foreign) / seconds, 2),
                    }
                    say(str(row))
                    rows.append(row)
    return rows


def medians(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> dict[str, dict[str, float]]:
    """Return the median of a value of rows by load and server."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault(row["load"], {}).setdefault(row["server"], []).append(value(row))
    return {load: {label: round(median(of), 3) for label, of in by.items()} for load, by in values.items()}


def ratios(rows: Sequence[dict[str, Any]], first: str) -> dict[str, list[float]]:
    """Return the first server's rate over that of the best other one by load, of each round that has all of them."""
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        rates.setdefault((row["load"], row["round"]), {})[row["server"]] = row["tokens_per_s"]
    servers = max(map(len, rates.values()))
    compared: dict[str, list[float]] = {}
    for (load, _), by in rates.items():
        if len(by) == servers:
            best_other = max(rate for label, rate in by.items() if label != first)
            compared.setdefault(load, []).append(round(by[first] / best_other, 3))
    return compared


def main() -> None:
    """Measure, print the medians and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", help="ours first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--decoded", type=int, default=DECODED, help="tokens that one stream decodes")
    parser.add_argument("--long-prompts", type=int, default=LONG_PROMPTS)
    parser.add_argument("--sampling", type=json.loads, default=GREEDY, help="fields of requests, as JSON")
    parser.add_argument("--start-timeout", type=float, default=120)
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = measure(options, lambda line: print(line, flush=True))
    size, valid = token_bytes(options.model), [row for row in rows if row["foreign_cores"] <= FOREIGN_CORES]
    by_round = ratios(valid, options.servers[0].partition("=")[0]) if len(options.servers) > 1 else {}
    shares = medians(valid, lambda row: row["tokens_per_s"] * size / row["read_gb_per_s"] / 1e9)
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "cores": os.cpu_count(),
        "sampling": options.sampling,
        "token_mb": round(size / 1e6, 1),
        "medians": medians(valid, lambda row: float(row["tokens_per_s"])),
        "read_gb_per_s": medians(valid, lambda row: float(row["read_gb_per_s"])),
        "floor_share": shares.get("decode"),
        "ratio": {load: round(median(values), 3) for load, values in by_round.items()},
        "ratio_by_round": by_round,
        "rows": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=1))


if __name__ == "__main__":
    main()

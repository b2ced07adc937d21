"""Throughput and hit rate of replicas on conversations: one engine, and replicas with Quire's dispatch and in turns.

    python -m benchmarks.replicas --sizes 1 2 4 --out benchmarks/results/FILE.json

Every server gets the same trace: conversations that go on at the same time, each a client that sends its next turn
when it has read the answer. A prompt is all that was said before: if it is cached, only the last turn is computed.
Conversations of a group begin with the same system prompt. "in turns" names the replica of each request in the header
x-data-parallel-rank, one after the other, as a plain load balancer would. Weights are random (--load-format dummy).
The servers run one after the other, in as many rounds; each round begins with another one. --add adds rounds to those
that a file of results has, for a machine that is quiet for minutes only.

    python -m benchmarks.replicas --kill 64 --rounds 5

kills (SIGKILL) one of two replicas under so many streams instead, and measures how long its streams take to get their
error, and how many end as if nothing had happened.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer, models

_READY_SECONDS = 300
_VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is served. `in_turns`: the client chooses replicas one after the other."""

    replicas: int
    in_turns: bool = False

    @property
    def name(self) -> str:
        """Its name in results."""
        if self.replicas == 1:
            return "one engine"
        return f"{self.replicas} replicas{', in turns' if self.in_turns else ''}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one setup has done in one round; times in seconds."""

    seconds: float
    output_tokens_per_second: float
    hit_rate: float
    ttft_median: float
    ttft_p99: float
    by_replica: list[int]


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Write the config and tokenizer of a Llama; a server fills its weights with random numbers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{index}": index for index in range(_VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))  # noqa: S106 no password
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")


@contextmanager
def serving(folder: Path, setup: Setup, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The URL of a server with this setup, and its process id."""
    url = f"http://127.0.0.1:{options.port}"
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(options.port), "--no-access-log"]
    command += ["--load-format", "dummy", "--data-parallel-size", str(setup.replicas), "--engine-process"]
    command += ["--kv-cache-memory-bytes", str(options.cache // setup.replicas), "--max-client-share", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + _READY_SECONDS
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server does not start: {' '.join(command)}")
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, _VOCABULARY) for _ in range(count)]


async def _converse(
    client: httpx.AsyncClient,
    history: list[int],
    source: random.Random,
    headers: Iterator[dict[str, str]],
    options: argparse.Namespace,
) -> list[float]:
    """Have a conversation; returns the time to the first token of each turn."""
    times = []
    for _ in range(options.turns):
        history += _tokens(source, options.input_len)
        body = {
            "prompt": history,
            "max_tokens": options.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        began, first = time.monotonic(), 0.0
        async with client.stream("POST", "/v1/completions", json=body, headers=next(headers)) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                first = first or time.monotonic()
                history += choice.get("token_ids") or []
        times.append(first - began)
    return times


async def converse(url: str, setup: Setup, options: argparse.Namespace, seed: int) -> Measured:
    """Have all conversations at the same time."""
    source = random.Random(seed)
    systems = [_tokens(source, options.system_len) for _ in range(options.groups)]
    ranks = itertools.cycle(range(setup.replicas))
    chosen = ({"x-data-parallel-rank": str(next(ranks))} if setup.in_turns else {} for _ in itertools.count())
    before = _counters(url)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        conversations = (
            _converse(client, [*systems[index % len(systems)]], random.Random(seed * 1000 + index), chosen, options)
            for index in range(options.conversations)
        )
        times = list(itertools.chain.from_iterable(await asyncio.gather(*conversations)))
    seconds = time.monotonic() - began
    after = _counters(url)
    hits, queries = (
        sum(after[name].values()) - sum(before[name].values())
        for name in ("prefix_cache_hits_total", "prefix_cache_queries_total")
    )
    answered = after["request_success_total"]
    output = options.conversations * options.turns * options.output_len
    return Measured(
        round(seconds, 3),
        round(output / seconds, 1),
        round(hits / queries, 4),
        round(median(times), 4),
        round(quantiles(times, n=100)[98], 4),
        [int(answered[engine]) for engine in sorted(answered)],
    )


def _counters(url: str) -> dict[str, dict[str, float]]:
    """The counters that are read, by engine."""
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total", "request_success_total")
    values: dict[str, dict[str, float]] = {name: {} for name in names}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        match = re.match(r'vllm:(\w+)\{.*engine="(\d+)".*\} (\S+)', line)
        if match and match[1] in values:
            of_engines = values[match[1]]
            of_engines[match[2]] = of_engines.get(match[2], 0.0) + float(match[3])
    return values


async def _stream(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> tuple[str, float]:
    """How a stream ends, and when."""
    body = {"prompt": f"w{number + 3} w5", "max_tokens": 400, "ignore_eos": True, "stream": True}
    ended, is_first = "", True
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if is_first:
                is_first = False
                begun.release()
            event = json.loads(line[6:])
            ended = "error" if "error" in event else event["choices"][0]["finish_reason"] or ended
            if ended == "error":
                break
    return ended, time.monotonic()


async def kill_one(url: str, pid: int, count: int) -> dict[str, float]:
    """Kill the replica that was started last under so many streams."""
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        streams = [asyncio.create_task(_stream(client, number, begun)) for number in range(count)]
        for _ in range(count):
            await begun.acquire()
        children = psutil.Process(pid).children(recursive=True)
        cores = [child for child in children if any("spawn_main" in word for word in child.cmdline())]
        killed = time.monotonic()
        max(cores, key=lambda child: child.create_time()).kill()
        ends = await asyncio.gather(*streams)
    errors = [came - killed for kind, came in ends if kind == "error"]
    whole = sum(kind == "length" for kind, _ in ends)
    return {"errors": len(errors), "whole_answers": whole, "last_error_seconds": round(max(errors), 4)}


def measure_deaths(options: argparse.Namespace) -> None:
    """Kill a replica in as many rounds, each with a server of its own."""
    results = _earlier(options).get("rounds", [])
    with TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        for _ in range(options.rounds):
            with serving(Path(folder), Setup(2), options) as (url, pid):
                results.append(asyncio.run(kill_one(url, pid, options.kill)))
            print(results[-1], flush=True)
    if options.out:
        content = {"date": str(date.today()), "streams": options.kill, "rounds": results}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The results that more are added to."""
    if not options.add:
        return {}
    content: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of replicas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4, help="of conversations with one system prompt")
    parser.add_argument("--system-len", type=int, default=256, help="tokens of a system prompt")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a turn of a user")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cache", type=int, default=1 << 30, help="bytes of all KV caches of a server together")
    parser.add_argument("--port", type=int, default=9360)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="to the rounds of --out, which have the same settings")
    parser.add_argument("--kill", type=int, metavar="STREAMS", help="kill a replica under so many streams instead")
    options = parser.parse_args()
    if options.kill:
        measure_deaths(options)
        return
    setups = [Setup(size) for size in options.sizes]
    setups += [Setup(size, in_turns=True) for size in options.sizes if size > 1]
    earlier = _earlier(options).get("measured", {})
    measured = {setup.name: [Measured(**each) for each in earlier.get(setup.name, ())] for setup in setups}
    first = len(measured[setups[0].name])
    with TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        for number in range(first, first + options.rounds):
            for setup in setups[number % len(setups) :] + setups[: number % len(setups)]:
                with serving(Path(folder), setup, options) as (url, _):
                    result = asyncio.run(converse(url, setup, options, seed=number))
                measured[setup.name].append(result)
                print(f"{setup.name:24} {result}", flush=True)
    reference = median(result.output_tokens_per_second for result in measured[setups[0].name])
    for name, results in measured.items():
        throughput = median(result.output_tokens_per_second for result in results) / reference
        hits = median(result.hit_rate for result in results)
        print(f"{name:24} {throughput:.2f} times the throughput of {setups[0].name}, hit rate {hits:.3f}")
    if options.out:
        settings = {
            name: value for name, value in vars(options).items() if name not in ("out", "port", "add", "rounds")
        }
        content = {
            "date": str(date.today()),
            "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
            "settings": settings,
            "measured": {name: [asdict(result) for result in results] for name, results in measured.items()},
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

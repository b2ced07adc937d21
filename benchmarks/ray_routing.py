"""Measure the hit rate of the prefix cache on Ray: two replicas with each router, one replica with twice the cache.

    python -m benchmarks.ray_routing --result ray-routing.json

It starts a Ray cluster on this machine (quire[ray]) and serves the bundled quire-nano on it. The conversations are the
same in each run; answers are not what is measured, and short.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ray_cluster import cluster, quire_config

_WORDS = ("river", "stone", "letter", "garden", "window", "winter", "copper", "engine", "harbour", "violin", "basket")
_ROUND_ROBIN = "ray.serve.experimental.round_robin_router:RoundRobinRouter"
_CACHE_TOKENS = 8192  # of each of two replicas


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were in the cache."""
        return self.cached_tokens / self.prompt_tokens


def conversations(number: int, turns: int, seed: int) -> list[list[str]]:
    """The messages of users, each conversation below one of three system prompts, which comes first."""
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choices(_WORDS, k=words))

    systems = [text(120) for _ in range(3)]
    return [[chance.choice(systems), *(text(chance.randint(30, 90)) for _ in range(turns))] for _ in range(number)]


async def replay(url: str, name: str, dialogues: Sequence[Sequence[str]], concurrency: int) -> Outcome:
    """Hold conversations, several at a time."""
    waiting = list(dialogues)
    usages: list[dict[str, Any]] = []

    async def hold(client: httpx.AsyncClient) -> None:
        while waiting:
            system, *turns = waiting.pop()
            messages = [{"role": "system", "content": system}]
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                body = {"model": "quire-nano", "messages": messages, "max_tokens": 4, "temperature": 0}
                response = await client.post("v1/chat/completions", json=body)
                response.raise_for_status()
                usages.append(response.json()["usage"])
                messages.append({"role": "assistant", "content": "I see. " + turn[:40]})

    async with httpx.AsyncClient(base_url=url, timeout=300) as client, asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(hold(client))
    return Outcome(
        name,
        len(usages),
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
    )


def config(cache: int) -> dict[str, Any]:
    """Return the config of all applications. `cache`: bytes of the KV cache of each of two replicas."""
    routers = {"prefix": {}, "round-robin": {"request_router_config": {"request_router_class": _ROUND_ROBIN}}}
    return {
        "applications": [_application("large", 2 * cache, 1)]
        + [_application(name, cache, 2, **options) for name, options in routers.items()]
    }


def _application(name: str, cache: int, replicas: int, **options: Any) -> dict[str, Any]:
    args = {"model": "quire-nano", "kv_cache_memory_bytes": cache, "max_num_seqs": 16}
    (application,) = quire_config(args=args, num_replicas=replicas, **options)["applications"]
    return {**application, "name": name, "route_prefix": f"/{name}"}


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--bytes-per-token", type=int, default=6144, help="of quire-nano's KV cache")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    dialogues = conversations(options.conversations, options.turns, seed=1)
    names = {
        "large": "one replica, twice the cache",
        "prefix": "two replicas, prefix router",
        "round-robin": "two replicas, round robin",
    }
    with cluster(cpus=6) as running, running.serving(config(_CACHE_TOKENS * options.bytes_per_token)):
        running.wait_for_replicas(5)
        outcomes = [
            asyncio.run(replay(f"{running.url}/{path}", name, dialogues, options.concurrency))
            for path, name in names.items()
        ]
    for outcome in outcomes:
        share = outcome.hit_rate / outcomes[0].hit_rate
        print(f"{outcome.name:30} {outcome.requests:6} requests, hit rate {outcome.hit_rate:.3f}, ratio {share:.3f}")
    if options.result is not None:
        result = {
            "command": "python -m benchmarks.ray_routing",
            "cache_tokens": _CACHE_TOKENS,
            "outcomes": [{**asdict(outcome), "hit_rate": round(outcome.hit_rate, 4)} for outcome in outcomes],
        }
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""StatsLog: a line in the log about what an engine does, every few seconds while it works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from typing_extensions import override

from quire.engine.client.engine import Engine
from quire.engine.client.origin import Origin
from quire.engine.client.protocol import StepStats
from quire.engine.client.records import Observer
from quire.engine.client.timeline import RequestTimes

logger = logging.getLogger("quire.stats")


class StatsCounts(msgspec.Struct):
    """What an engine has done since the last line."""

    step_tokens: int = 0
    generated: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0


class StatsLog(Observer):
    """Count what the engine of a model does, and log it. The words are vLLM's."""

    def __init__(self, name: str, client: Engine) -> None:
        """`name`: of the model."""
        self._name = name
        self._client = client
        self._counts = StatsCounts()
        self._begun = time.monotonic()
        client.observers.add(self)

    @override
    def on_step(self, stats: StepStats) -> None:
        counts = self._counts
        counts.step_tokens += stats.step_tokens
        counts.prefix_queries += stats.prefix_queries
        counts.prefix_hits += stats.prefix_hits
        counts.drafted += stats.drafted_tokens
        counts.accepted += stats.accepted_tokens

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        self._counts.generated += count

    async def write_regularly(
        self, interval: float, others: Callable[[], Awaitable[Sequence[StatsCounts]]] | None = None
    ) -> None:
        """Log a line each `interval` seconds in which something was done, or is to be done.

        `others`: gives what other front ends of the engine have counted.
        """
        while True:
            await asyncio.sleep(interval)
            for counts in [] if others is None else await others():
                self.add(counts)
            self.write()

    def take(self) -> StatsCounts:
        """Return what was done since the last call or line, which another process logs."""
        counts, self._counts = self._counts, StatsCounts()
        return counts

    def add(self, counts: StatsCounts) -> None:
        """Add what another front end has counted."""
        for name in counts.__struct_fields__:
            setattr(self._counts, name, getattr(self._counts, name) + getattr(counts, name))

    def write(self) -> None:
        """Log what was done since the last call, unless that is nothing."""
        counts, self._counts = self._counts, StatsCounts()
        now = time.monotonic()
        seconds, self._begun = max(now - self._begun, 1e-3), now
        stats = self._client.stats
        if not counts.step_tokens and not stats.running and not stats.waiting:
            return
        fields = {
            "model": self._name,
            "prompt_tokens_per_second": round(max(0, counts.step_tokens - counts.generated) / seconds, 1),
            "generation_tokens_per_second": round(counts.generated / seconds, 1),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_cache_usage_percent": _percent(stats.blocks_used, stats.blocks_total),
            "prefix_cache_hit_percent": _percent(counts.prefix_hits, counts.prefix_queries),
        }
        text = (
            "{model}: Avg prompt throughput: {prompt_tokens_per_second} tokens/s, "
            "Avg generation throughput: {generation_tokens_per_second} tokens/s, "
            "Running: {running} reqs, Waiting: {waiting} reqs, KV cache usage: {kv_cache_usage_percent}%, "
            "Prefix cache hit rate: {prefix_cache_hit_percent}%"
        )
        if counts.drafted:
            fields["draft_acceptance_percent"] = _percent(counts.accepted, counts.drafted)
            text += ", Draft acceptance rate: {draft_acceptance_percent}%"
        logger.info("%s", text.format_map(fields), extra={"fields": fields})


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0

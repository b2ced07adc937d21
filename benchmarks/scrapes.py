"""Time of a scrape of /metrics, and for how long it holds the event loop: `python -m benchmarks.scrapes`."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import median

from quire.engine.client.origin import Origin
from quire.engine.client.protocol import StepStats
from quire.engine.client.records import RequestRecord
from quire.engine.client.timeline import RequestTimes
from quire.engine.client.trace_context import TraceContext
from quire.metrics.exposition import Exposition
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics

TRACED = Origin("request", TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"))
FORMATS = {"text": "", "openmetrics": "application/openmetrics-text"}


def recorded(models: int) -> tuple[Metrics, list[ModelMetrics]]:
    """Metrics of models that have answered requests, with exemplars and HTTP metrics."""
    metrics = Metrics(max_model_len=1 << 17, vllm_names=True)
    observers = [ModelMetrics(metrics, f"model-{index}", index) for index in range(models)]
    for observer in observers:
        for number in range(200):
            observer.on_step(StepStats(running=1, step_tokens=16, step_seconds=0.01))
            observer.on_finish(record(number / 50))
    for handler in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/models"):
        for status in ("2xx", "4xx", "5xx"):
            metrics.http.requests.labels("POST", handler, status).inc()
        metrics.http.seconds.labels("POST", handler).observe(0.1)
    return metrics, observers


def record(seconds: float) -> RequestRecord:
    """A request that has taken so long."""
    times = RequestTimes(queued=1.0, scheduled=1.1, first_token=1.2, last_token=1.2 + seconds, sent=1.3 + seconds)
    return RequestRecord(
        request_id="one",
        origin=TRACED,
        kind="generate",
        times=times,
        finish_reason="stop",
        prompt_tokens=100,
        cached_tokens=16,
        output_tokens=50,
        max_tokens=50,
        answers=1,
        longest_answer=50,
    )


async def scrapes(exposition: Exposition, accept: str, encoding: str, together: int) -> tuple[float, float, int]:
    """Return seconds until all scrapes have ended, the longest pause of the event loop (CPU time), and bytes."""
    longest, ended = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not ended:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    longest, begun = 0.0, time.perf_counter()
    pages = await asyncio.gather(*(exposition.page(accept, encoding) for _ in range(together)))
    seconds, ended = time.perf_counter() - begun, True
    await watching
    return seconds, longest, len(pages[0].body)


def main() -> None:
    """Print a line for each format, number of models and number of scrapes at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=20)
    repeat = parser.parse_args().repeat
    for models in (1, 4):
        metrics, observers = recorded(models)
        for name, accept in FORMATS.items():
            for encoding in ("", "gzip"):
                for together in (1, 20):
                    runs = [asyncio.run(_fresh(metrics, accept, encoding, together)) for _ in range(repeat)]
                    line = {
                        "models": models,
                        "format": name,
                        "encoding": encoding or "none",
                        "scrapes": together,
                        "ms": round(1e3 * median(run[0] for run in runs), 1),
                        "longest_pause_ms": round(1e3 * median(run[1] for run in runs), 2),
                        "bytes": runs[0][2],
                    }
                    print(json.dumps(line))
        begun = time.perf_counter()
        for _ in range(2000):
            observers[0].on_finish(record(0.5))
        print(
            json.dumps({"models": models, "us_for_a_finished_request": round(5e2 * (time.perf_counter() - begun), 1)})
        )


async def _fresh(metrics: Metrics, accept: str, encoding: str, together: int) -> tuple[float, float, int]:
    return await scrapes(Exposition(metrics), accept, encoding, together)


if __name__ == "__main__":
    main()

"""`quire bench serve`: benchmark a server."""

from __future__ import annotations

import asyncio
import sys

import httpx
from tqdm import tqdm

from quire.app.files import check_writable, file_error
from quire.app.openai_client import ServerError, connect, first_model
from quire.config.command import ConfigError
from quire.config.commands import BenchServe

try:
    from quire.app.bench import report
    from quire.app.bench.load import LoadResult, Sample, generate_load
except ImportError as missing:
    raise ConfigError(f"quire bench needs the package {missing.name}: pip install 'quire[bench]'") from missing


def run(settings: BenchServe) -> int:
    """Run the benchmark; returns the exit status, which is 1 if a request failed."""
    _check(settings)
    try:
        model = settings.model_name or _first_model(settings)
    except ServerError as error:
        print(f"quire bench serve: {error}", file=sys.stderr)
        return 1
    result = asyncio.run(_with_bar(settings, model))
    figures = report.summarize(result, settings, model)
    print(report.as_table(figures))
    if settings.result is not None:
        report.write_json(figures, settings.result)
    if settings.plot is not None:
        title = f"{model}: {settings.concurrency} at once, {settings.input_len} in, {settings.output_len} out"
        report.write_plot(result, title, settings.plot)
    return 1 if figures["failed"] else 0


def _check(settings: BenchServe) -> None:
    """Refuse files that cannot be written, before the benchmark runs."""
    check_writable(settings, "result")
    check_writable(settings, "plot")
    if settings.plot is not None and settings.plot.suffix:
        formats = report.plot_formats()
        if settings.plot.suffix[1:].lower() not in formats:
            raise file_error(settings, "plot", "a writable file", f"plots are written as {', '.join(formats)}")


def _first_model(settings: BenchServe) -> str:
    with connect(settings.url, settings.api_key, httpx.Timeout(10)) as client:
        return first_model(client)


async def _with_bar(settings: BenchServe, model: str) -> LoadResult:
    total = None if settings.duration is not None else settings.num_requests
    with tqdm(total=total, desc="requests", unit="req") as bar:

        def advance(_: Sample) -> None:
            bar.update()

        return await generate_load(settings, model, advance)

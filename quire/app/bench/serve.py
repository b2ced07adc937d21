"""`quire bench serve`: benchmark a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from tqdm import tqdm

from quire.app.files import check_writable
from quire.app.openai_client import ServerError, connect, error_text, first_model
from quire.config.command import ConfigError
from quire.config.commands import BenchServe

try:
    from quire.app.bench import report
    from quire.app.bench.load import LoadResult, Sample, generate_load
except ImportError as missing:
    raise ConfigError(f"quire bench needs the package {missing.name}: pip install 'quire[bench]'") from missing

_WRITE_SECONDS = 600.0  # in which a server writes a profile


def run(settings: BenchServe) -> int:
    """Run the benchmark; returns the exit status, which is 1 if a request failed."""
    _check(settings)
    try:
        model = settings.model_name or _first_model(settings)
    except ServerError as error:
        print(f"quire bench serve: {error}", file=sys.stderr)
        return 1
    try:
        with _profile(settings, model):
            result = asyncio.run(_with_bar(settings, model))
    except ServerError as error:
        print(f"quire bench serve: {error}", file=sys.stderr)
        return 1
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
    report.check_plot(settings, settings.plot)


def _first_model(settings: BenchServe) -> str:
    with connect(settings.url, settings.api_key, httpx.Timeout(10)) as client:
        return first_model(client)


@contextmanager
def _profile(settings: BenchServe, model: str) -> Iterator[None]:
    """With --profile, let the server record a profile meanwhile, as vLLM's benchmark does.

    Raises:
        ServerError: the server does not.
    """
    if not settings.profile:
        yield
        return
    root = settings.url.rstrip("/").removesuffix("/v1")
    with connect(root, settings.api_key, httpx.Timeout(_WRITE_SECONDS, connect=10)) as client:
        _post(client, "start_profile", model)
        try:
            yield
        finally:
            _post(client, "stop_profile", model)


def _post(client: httpx.Client, path: str, model: str) -> None:
    try:
        response = client.post(path, params={"model": model})
    except httpx.HTTPError as error:
        raise ServerError(f"the server does not answer at /{path}: {error}") from error
    if response.is_error:
        raise ServerError(f"/{path}: {error_text(response)}")


async def _with_bar(settings: BenchServe, model: str) -> LoadResult:
    total = None if settings.duration is not None else settings.num_requests
    with tqdm(total=total, desc="requests", unit="req") as bar:

        def advance(_: Sample) -> None:
            bar.update()

        return await generate_load(settings, model, advance)

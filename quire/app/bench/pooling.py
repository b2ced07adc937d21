"""`quire bench pooling`: benchmark embeddings or rerank."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

import httpx
from tqdm import tqdm

from quire.app.embed.embedders import model_with
from quire.app.files import check_writable
from quire.app.openai_client import ServerError
from quire.config.command import ConfigError
from quire.config.commands import BenchPooling

try:
    import aiohttp

    from quire.app.bench import report
    from quire.app.bench.load import LoadResult, Sample, Send, send_all
except ImportError as missing:
    raise ConfigError(f"quire bench needs the package {missing.name}: pip install 'quire[bench]'") from missing
from quire.app.bench.load import PromptMaker

_OK = 200
_MAX_QUOTED = 200  # characters of a response in error messages


def run(settings: BenchPooling) -> int:
    """Run the benchmark; returns the exit status, which is 1 if a request failed."""
    check_writable(settings, "result")
    if settings.min_len > settings.max_len:
        raise ConfigError(
            f"quire bench pooling: --min-len is {settings.min_len}, but must be at most --max-len, which is "
            f"{settings.max_len}"
        )
    try:
        result, model = asyncio.run(_measure(settings))
    except ServerError as error:
        print(f"quire bench pooling: {error}", file=sys.stderr)
        return 1
    figures = report.summarize_pooling(result, settings, model)
    print(report.as_pooling_table(figures))
    if settings.result is not None:
        report.write_json(figures, settings.result)
    return 1 if figures["failed"] else 0


async def _measure(settings: BenchPooling) -> tuple[LoadResult, str]:
    model = settings.model_name or await _model(settings)
    total = None if settings.duration is not None else settings.num_requests
    texts = _Texts(settings)
    with tqdm(total=total, desc="requests", unit="req") as bar:

        def advance(_: Sample) -> None:
            bar.update()

        def prepare() -> Send:
            body = texts.body(model)
            return lambda session: _send(session, settings, body)

        return await send_all(settings, random.Random(settings.workload_seed + 1), prepare, advance), model


async def _model(settings: BenchPooling) -> str:
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    try:
        client = httpx.AsyncClient(base_url=settings.url.rstrip("/") + "/", headers=headers, timeout=10)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ServerError(f"invalid server URL {settings.url}: {error}") from error
    async with client:
        return await model_with(client, "embed" if settings.endpoint == "embeddings" else "score")


class _Texts:
    """Texts of random words, of random lengths."""

    def __init__(self, settings: BenchPooling) -> None:
        self._settings = settings
        self._lengths = random.Random(settings.workload_seed)
        self._words = PromptMaker(settings.workload_seed, 0, 1)

    def body(self, model: str) -> dict[str, Any]:
        """The next request."""
        settings = self._settings
        texts = [
            self._words.text(self._lengths.randint(settings.min_len, settings.max_len))
            for _ in range(settings.batch_size)
        ]
        common = {"model": model, **({"truncate_prompt_tokens": -1} if settings.truncate else {})}
        if settings.endpoint == "rerank":
            return {**common, "query": self._words.text(settings.query_len), "documents": texts}
        return {**common, "input": texts, "encoding_format": settings.encoding_format}


async def _send(session: aiohttp.ClientSession, settings: BenchPooling, body: dict[str, Any]) -> Sample:
    sample = Sample()
    started = time.perf_counter()
    try:
        async with session.post(f"{settings.url.rstrip('/')}/{settings.endpoint}", json=body) as answer:
            if answer.status != _OK:
                sample.error = f"{answer.status}: {(await answer.text())[:_MAX_QUOTED]}"
            else:
                _read(sample, await answer.json(), settings)
    except (aiohttp.ClientError, OSError, ValueError) as error:  # a timeout is an OSError
        sample.error = repr(error)[:_MAX_QUOTED]
    sample.e2e = time.perf_counter() - started
    return sample


def _read(sample: Sample, content: Any, settings: BenchPooling) -> None:
    """Note the token count. A response without a result for each text is an error."""
    results = content.get("data" if settings.endpoint == "embeddings" else "results")
    if not isinstance(results, list) or len(results) != settings.batch_size:
        sample.error = f"the response does not have {settings.batch_size} results"
        return
    usage = content.get("usage")
    tokens = usage.get("prompt_tokens", usage.get("total_tokens")) if isinstance(usage, dict) else None
    sample.prompt_tokens = tokens if isinstance(tokens, int) else 0

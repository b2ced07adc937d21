"""`quire embed`: embeddings of the texts of a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from quire.app.embed.corpus import (
    FORMATS,
    Row,
    RowError,
    Sink,
    Vectors,
    batches_of,
    count_rows,
    has_parquet,
    open_sink,
    rows_of,
)
from quire.app.embed.embedders import Embedder, TextRefused, server_embedder
from quire.app.files import check_readable, check_writable, file_error
from quire.app.openai_client import ServerError
from quire.config.command import ConfigError
from quire.config.commands import Embed


def run(settings: Embed) -> int:
    """Embed the file; returns the exit status, which is 1 if a text or the server failed."""
    out = _check(settings)
    try:
        asyncio.run(_embed(settings, out))
    except (RowError, ServerError, TextRefused) as error:
        print(f"quire embed: {error}", file=sys.stderr)
        return 1
    return 0


def _check(settings: Embed) -> Path:
    """The file to write. Refuses settings that cannot work, before anything is loaded."""
    check_readable(settings, "file")
    check_writable(settings, "out")
    out = settings.out or settings.file.with_suffix(".npy")
    if out.suffix.lower() not in FORMATS:
        raise file_error(settings, "out", "a .npy or .parquet file", "other formats are not supported")
    if out.suffix.lower() == ".parquet" and not has_parquet():
        raise ConfigError("quire embed: .parquet files need the package pyarrow: pip install 'quire[parquet]'")
    if settings.url is not None and settings.serve_args:
        raise ConfigError("quire embed: --serve-args has no effect with --url")
    return out


async def _embed(settings: Embed, out: Path) -> None:
    total = count_rows(settings.file)
    batches = batches_of(rows_of(settings.file, settings.text_field), settings.batch_size)
    async with _embedder(settings) as embedder:
        progress: tqdm[NoReturn] = tqdm(total=total, desc="texts", unit="")
        with open_sink(out, total, settings.text_field) as sink, progress as bar:
            await _embed_all(embedder, batches, sink, bar, settings)
    print(f"{total} embeddings written to {out}")


def _embedder(settings: Embed) -> AbstractAsyncContextManager[Embedder]:
    if settings.url is not None:
        return server_embedder(settings)
    from quire.app.embed.local import local_embedder  # noqa: PLC0415 imports torch

    return local_embedder(settings)


async def _embed_all(
    embedder: Embedder, batches: Iterator[list[Row]], sink: Sink, bar: tqdm[NoReturn], settings: Embed
) -> None:
    """Embed some batches at the same time and write them in order."""
    running: list[tuple[list[Row], asyncio.Task[Vectors]]] = []
    try:
        for batch in batches:
            running.append((batch, asyncio.create_task(_embed_batch(embedder, batch, settings))))
            if len(running) >= settings.concurrency:
                await _write_first(running, sink, bar)
        while running:
            await _write_first(running, sink, bar)
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)


async def _write_first(running: list[tuple[list[Row], asyncio.Task[Vectors]]], sink: Sink, bar: tqdm[NoReturn]) -> None:
    batch, task = running[0]
    vectors = await task
    running.pop(0)
    sink.write([row.text for row in batch], vectors)
    bar.update(len(batch))


async def _embed_batch(embedder: Embedder, batch: list[Row], settings: Embed) -> Vectors:
    try:
        vectors = await embedder.embed([row.text for row in batch])
    except TextRefused as error:
        if error.index is None or error.index >= len(batch):
            raise
        raise RowError(f"{settings.file}, line {batch[error.index].line}: {error}") from error
    if len(vectors) != len(batch):
        raise ServerError(f"{len(vectors)} embeddings instead of {len(batch)} were returned")
    return vectors

"""Exposition: the metrics as text for scrapes, in Prometheus' format or OpenMetrics."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from typing_extensions import override

from quire.metrics.prometheus import Metrics
from quire.workers.turns import turns

_FLOW = " scrapes"  # of turns of the event loop
_SLICE = 0.001  # seconds of rendering in a turn; one metric of several models takes about as long
_LEVEL = 1  # of compression: a third of the time of the default, for a fifth more bytes


@dataclass(frozen=True, slots=True)
class Format:
    """A format of metrics.

    Attributes:
        content_type: of a response.
        render: gives the text of a metric.
        end: what follows the last metric.
    """

    content_type: str
    render: Callable[[Metric], bytes]
    end: bytes = b""


class _Single(Collector):
    """Collect one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @override
    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _plain_text(metric: Metric) -> bytes:
    return generate_latest(_Single(metric), openmetrics.ALLOWUTF8)


_END = b"# EOF\n"


def _openmetrics_text(metric: Metric) -> bytes:
    # Without UTF-8 the colons of names would become underscores, though both formats allow them.
    text: bytes = openmetrics.generate_latest(_Single(metric), openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.removesuffix(_END)


_OPENMETRICS, _PLAIN = "application/openmetrics-text", "text/plain"
# Of Prometheus' text the version 0.0.4: 1.0.0 requires that names with a colon are quoted.
PLAIN = Format(CONTENT_TYPE_PLAIN_0_0_4, _plain_text)
OPENMETRICS = Format(openmetrics.CONTENT_TYPE_LATEST, _openmetrics_text, _END)


def format_for(accept: str) -> Format:
    """Return the format that an Accept header asks for: OpenMetrics if it is preferred there, else Prometheus' text."""
    wanted = _qualities(accept, _is_readable)
    return OPENMETRICS if 0 < wanted.get(_OPENMETRICS, 0.0) >= wanted.get(_PLAIN, 0.0) else PLAIN


def _qualities(header: str, accepts: Callable[[Sequence[str]], bool] = lambda _: True) -> dict[str, float]:
    """Return the highest quality of each value in a header of accepted values. `accepts`: judges their parameters."""
    qualities: dict[str, float] = {}
    for entry in header.lower().split(","):
        value, *parameters = (part.strip() for part in entry.split(";"))
        if accepts(parameters):
            qualities[value] = max(qualities.get(value, 0.0), _quality(parameters))
    return qualities


def _quality(parameters: Sequence[str]) -> float:
    text = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    try:
        return float(text)
    except ValueError:
        return 0.0


def _is_readable(parameters: Sequence[str]) -> bool:
    """Return whether a client that accepts a format with these parameters can read our version of it."""
    version = next((parameter for parameter in parameters if parameter.startswith("version=")), None)
    return version in (None, "version=1.0.0", "version=0.0.4")


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics as the body of a response.

    Attributes:
        headers: of the response.
    """

    body: bytes
    headers: dict[str, str]


class Exposition:
    """Render metrics for scrapes, in slices between which the event loop does other things.

    There is one rendering at a time. scrapes that come meanwhile share the next one, so that any number of them costs
    no more than two, and each sees all that was recorded before it came.
    """

    def __init__(self, metrics: Metrics, of_all: Callable[[], Awaitable[Sequence[Metric]]] | None = None) -> None:
        """`of_all`: gives the metrics of all processes of the server; None: there is this one."""
        self._metrics = metrics
        self._of_all = of_all
        self._rendering = asyncio.Lock()
        self._next: dict[tuple[Format, bool], asyncio.Task[bytes]] = {}  # those that have not begun

    async def page(self, accept: str, accept_encoding: str) -> Page:
        """Return the metrics in the format and the encoding that these headers ask for."""
        form, is_compressed = format_for(accept), _qualities(accept_encoding).get("gzip", 0.0) > 0
        key = form, is_compressed
        if key not in self._next:
            self._next[key] = asyncio.create_task(self._render(form, is_compressed))
        body = await asyncio.shield(self._next[key])
        headers = {"content-type": form.content_type, "vary": "accept, accept-encoding"}
        return Page(body, {**headers, "content-encoding": "gzip"} if is_compressed else headers)

    async def _render(self, form: Format, is_compressed: bool) -> bytes:
        async with self._rendering:
            del self._next[form, is_compressed]
            pieces = list[bytes]()
            ends = 0.0
            for metric in self._metrics.collect() if self._of_all is None else await self._of_all():
                if time.monotonic() >= ends:
                    await turns().take(_FLOW)
                    ends = time.monotonic() + _SLICE
                pieces.append(form.render(metric))
            text = b"".join([*pieces, form.end])
            return await asyncio.to_thread(gzip.compress, text, _LEVEL) if is_compressed else text

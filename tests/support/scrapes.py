"""Scrapes of a server, read with Prometheus' own parsers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.server import Server

OPENMETRICS = "application/openmetrics-text"


async def scrape(server: Server, accept: str = "*/*") -> list[Metric]:
    """The metrics in the format that an Accept header asks for."""
    answer = await server.http.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    parse = parse_openmetrics if answer.headers["content-type"].startswith(OPENMETRICS) else parse_text
    return list(parse(answer.text))


def values(metrics: Iterable[Metric]) -> dict[str, float]:
    """All samples by name and labels, as in Prometheus' text."""
    return {sample.name + _in_braces(sample.labels): sample.value for metric in metrics for sample in metric.samples}


async def values_of(server: Server) -> dict[str, float]:
    """All samples of a server's metrics by name and labels."""
    return values(await scrape(server))


def _in_braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}" if labels else ""

"""Prometheus' HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Series:
    """A series of an answer: its labels, and its values at their times."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class Prometheus:
    """A Prometheus server, asked with the expressions of dashboards.

    Args:
        url: its address.
        window: seconds that stand for the intervals over which rates are computed.
    """

    def __init__(self, url: str, window: int = 15) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)
        self._window = window

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def ask(self, expression: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        """The values of an expression between two times, in Unix seconds.

        Raises:
            ValueError: Prometheus does not accept the expression.
        """
        query = self.filled(expression, end - start)
        data = {"query": query, "start": start, "end": end, "step": step}
        answer = self._http.post("/api/v1/query_range", data=data).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']} in {query}")
        return [
            Series(
                series["metric"],
                tuple(float(time) for time, _ in series["values"]),
                tuple(float(value) for _, value in series["values"]),
            )
            for series in answer["data"]["result"]
        ]

    def filled(self, expression: str, duration: float) -> str:
        """An expression in which everything is selected, for a page that shows `duration` seconds."""
        for variable in ("job", "instance", "model_name"):
            expression = expression.replace(f"${variable}", ".*")
        for variable in ("__rate_interval", "__interval"):
            expression = expression.replace(f"${variable}", f"{self._window}s")
        return expression.replace("$__range", f"{max(1, round(duration))}s")

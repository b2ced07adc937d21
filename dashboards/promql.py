"""Expressions in PromQL, restricted to what a dashboard's variables select."""

from __future__ import annotations

from dataclasses import dataclass

RATE_INTERVAL = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Selection:
    """The series of a dashboard that its variables select.

    Attributes:
        matchers: matchers of labels that all of its series have.
    """

    matchers: tuple[str, ...]

    def series(self, name: str, *matchers: str) -> str:
        """A metric's series."""
        return f"{name}{{{', '.join((*self.matchers, *matchers))}}}"

    def rate(self, name: str, *matchers: str, by: str = "") -> str:
        """Increase of counters per second, summed up."""
        return f"sum{_grouping(by)}(rate({self.series(name, *matchers)}[{RATE_INTERVAL}]))"

    def sum(self, name: str, *matchers: str, by: str = "") -> str:
        """Sum of gauges."""
        return f"sum{_grouping(by)}({self.series(name, *matchers)})"

    def max(self, name: str, *matchers: str, by: str = "") -> str:
        """Largest of gauges."""
        return f"max{_grouping(by)}({self.series(name, *matchers)})"

    def count(self, name: str, *matchers: str, by: str = "") -> str:
        """Number of series."""
        return f"count{_grouping(by)}({self.series(name, *matchers)})"

    def busiest_rate(self, name: str, *matchers: str, by: str = "") -> str:
        """Increase of the counter that grows fastest, per second."""
        return f"max{_grouping(by)}(rate({self.series(name, *matchers)}[{RATE_INTERVAL}]))"

    def share(self, part: str, whole: str, by: str = "") -> str:
        """Part of a counter's increase in that of another one. There is none while the other one stands still."""
        return ratio(self.rate(part, by=by), self.rate(whole, by=by))

    def mean(self, histogram: str, by: str = "") -> str:
        """Mean of a histogram's observations."""
        return self.share(f"{histogram}_sum", f"{histogram}_count", by)

    def quantile(self, quantile: float, histogram: str, by: str = "") -> str:
        """Quantile of a histogram's observations, interpolated in its bucket."""
        buckets = self.rate(f"{histogram}_bucket", by=f"{by}, le" if by else "le")
        return f"histogram_quantile({quantile}, {buckets})"


def ratio(part: str, whole: str) -> str:
    """Quotient of two expressions; nothing where the divisor is 0."""
    return f"{part} / ({whole} > 0)"


_TARGET = ('job=~"$job"', 'instance=~"$instance"')
# Metrics of the process and of HTTP requests have no model.
SERVERS = Selection(_TARGET)
MODELS = Selection((*_TARGET, 'model_name=~"$model_name"'))


def _grouping(by: str) -> str:
    return f" by ({by}) " if by else ""

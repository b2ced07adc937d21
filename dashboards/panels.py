"""What dashboards show, in no tool's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dashboards.metric_names import named_in

Unit = Literal["count", "share", "seconds", "bytes", "tokens", "per second", "requests/s", "tokens/s", "cores"]
Color = Literal["green", "yellow", "orange", "red", "blue", "purple", "gray", "p50", "p95", "p99"]
WIDTH = 24  # of the grid


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the name of its series.

    Attributes:
        name: what the legend says; `{{label}}` stands for the value of a label.
        color: of its series; chosen by the tool if empty.
        exemplars: ask for the traces of single requests, too.
    """

    expression: str
    name: str
    color: Color | None = None
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The values from which on a number is shown as a warning, and as an error."""

    warning: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A rectangle of a dashboard. `about` says what it shows and what to conclude."""

    title: str
    about: str
    width: int = 8
    height: int = 8

    @property
    def queries(self) -> tuple[Query, ...]:
        """Its queries."""
        return ()

    @property
    def description(self) -> str:
        """`about`, and the meanings of its metrics in docs/metrics.md."""
        metrics = named_in(query.expression for query in self.queries)
        return "\n\n".join([self.about, *(f"`{name}`: {meaning}" for name, meaning in metrics.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Panel):
    """Numbers over time.

    Attributes:
        stacked: areas that add up, in place of lines.
        maximum: of the axis, which begins at 0.
        colors: of series by their names, where a query has several.
        limits: drawn as lines.
    """

    lines: tuple[Query, ...]
    unit: Unit
    stacked: bool = False
    maximum: float | None = None
    colors: Mapping[str, Color] = field(default_factory=dict)
    limits: Limits | None = None

    @property
    def queries(self) -> tuple[Query, ...]:
        """Its queries."""
        return self.lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """The latest value of one number, above its course."""

    expression: str
    unit: Unit
    limits: Limits | None = None
    width: int = 4
    height: int = 4

    @property
    def queries(self) -> tuple[Query, ...]:
        """Its query."""
        return (Query(self.expression, self.title),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Panel):
    """The buckets of a histogram over time."""

    expression: str
    unit: Unit

    @property
    def queries(self) -> tuple[Query, ...]:
        """Its query."""
        return (Query(self.expression, "{{le}}"),)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers in a table."""

    title: str
    expression: str
    unit: Unit
    limits: Limits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """The latest values of several expressions, which have the same labels.

    Attributes:
        labels: those that are shown, with the titles of their columns.
        columns: of numbers, behind those of the labels.
    """

    labels: Mapping[str, str]
    columns: tuple[Column, ...]
    width: int = WIDTH

    @property
    def queries(self) -> tuple[Query, ...]:
        """One query for each column."""
        return tuple(Query(column.expression, column.title) for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Info(Panel):
    """The labels of series whose values say nothing.

    Attributes:
        labels: those that are shown, with the titles of their columns.
    """

    expression: str
    labels: Mapping[str, str]
    width: int = WIDTH

    @property
    def queries(self) -> tuple[Query, ...]:
        """Its query."""
        return (Query(self.expression, self.title),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Panel):
    """`about`, in Markdown."""

    width: int = WIDTH


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title."""

    title: str
    panels: tuple[Panel, ...]

    def places(self) -> Iterator[tuple[Panel, int, int]]:
        """Each panel with its left and upper edge in the grid of the row."""
        left = top = height = 0
        for panel in self.panels:
            if left + panel.width > WIDTH:
                left, top, height = 0, top + height, 0
            yield panel, left, top
            left += panel.width
            height = max(height, panel.height)

    @property
    def height(self) -> int:
        """Its height in the grid, without the title."""
        return max(top + panel.height for panel, _, top in self.places())


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page.

    Attributes:
        name: of its files, and in addresses.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """The panels of all rows."""
        for row in self.rows:
            yield from row.panels

"""Draws dashboards from the data of a Prometheus: `python -m dashboards.pictures http://127.0.0.1:9090 FOLDER`.

For the documentation, and to look at dashboards where no Grafana is at hand. They look much as in Grafana, not exactly.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.dates import DateFormatter, date2num
from PIL import Image

from dashboards.__main__ import dashboards
from dashboards.panels import (
    WIDTH,
    Color,
    Dashboard,
    Heatmap,
    Info,
    Limits,
    Lines,
    Panel,
    Query,
    Stat,
    Table,
    Text,
    Unit,
)
from dashboards.prometheus_api import Prometheus, Series

_CELL = (0.5, 0.3)  # inches of a cell of the grid
_BACK, _PANEL, _TEXT, _DIM, _LINE = "#111217", "#181b1f", "#ccccdc", "#8e8e99", "#2c3038"
_COLORS: Mapping[Color, str] = {
    "green": "#73bf69",
    "yellow": "#fade2a",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "gray": "#9a9aa5",
    "p50": "#8ab8ff",
    "p95": "#5794f2",
    "p99": "#a352cc",
}
_CYCLE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d", "#fade2a")
_SUFFIXES: Mapping[Unit, str] = {
    "per second": "/s",
    "requests/s": " req/s",
    "tokens/s": " tok/s",
    "cores": " cores",
}


class Page:
    """A dashboard as a figure.

    Args:
        prometheus: where its data are.
        span: the first and the last time of its data, in Unix seconds.
    """

    def __init__(self, dashboard: Dashboard, prometheus: Prometheus, span: tuple[float, float]) -> None:
        self._prometheus = prometheus
        self._span = span
        self._height = 1.5 + sum(1 + row.height for row in dashboard.rows)
        self._figure = plt.figure(figsize=(WIDTH * _CELL[0], self._height * _CELL[1]), dpi=100, facecolor=_BACK)
        self._write(0.3, 1.0, dashboard.title, size=13, color=_TEXT)
        top = 1.5
        for row in dashboard.rows:
            self._write(0.2, top + 0.7, f"⌄ {row.title}", size=10, color=_TEXT)
            top += 1
            for panel, left, below in row.places():
                self._draw(panel, left, top + below)
            top += row.height

    def save(self, path: Path) -> None:
        """Write the picture, with the few colors that it has."""
        self._figure.savefig(path, facecolor=_BACK)
        plt.close(self._figure)
        with Image.open(path) as image:
            image.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)

    def _write(self, left: float, top: float, text: str, *, size: float, color: str) -> None:
        """Text at a place of the grid."""
        self._figure.text(left / WIDTH, 1 - top / self._height, text, fontsize=size, color=color)

    def _axes(self, left: float, top: float, width: float, height: float, **settings: Any) -> Any:
        """Axes at a place of the grid."""
        place = (left / WIDTH, 1 - (top + height) / self._height, width / WIDTH, height / self._height)
        return self._figure.add_axes(place, **settings)

    def _draw(self, panel: Panel, left: float, top: float) -> None:
        frame = self._axes(left + 0.08, top + 0.12, panel.width - 0.16, panel.height - 0.24, facecolor=_PANEL)
        frame.set(xticks=[], yticks=[])
        for spine in frame.spines.values():
            spine.set_color(_LINE)
        self._write(left + 0.3, top + 0.85, panel.title, size=8.5, color=_TEXT)
        match panel:
            case Lines():
                self._lines(panel, left, top)
            case Stat():
                self._stat(panel, left, top)
            case Heatmap():
                self._heatmap(panel, left, top)
            case Table():
                self._table(panel, left, top)
            case Info():
                rows = [
                    [series.labels.get(name, "") for name in panel.labels] for series in self._ask(panel.queries[0])
                ]
                self._cells(panel, left, top, [*panel.labels.values()], rows)
            case Text():
                self._text(panel, left, top)

    def _ask(self, query: Query) -> list[Series]:
        start, end = self._span
        step = max(1.0, round((end - start) / 150))
        return self._prometheus.ask(query.expression, start, end, step)

    def _named(self, panel: Lines) -> list[tuple[str, str, Series]]:
        """The series of a panel with their names and colors."""
        named: list[tuple[str, str, Series]] = []
        for query in panel.lines:
            for series in sorted(self._ask(query), key=lambda series: sorted(series.labels.items())):
                name = _name(query, series)
                color = query.color or panel.colors.get(name)
                named.append((name, _COLORS[color] if color else _CYCLE[len(named) % len(_CYCLE)], series))
        return named

    def _lines(self, panel: Lines, left: float, top: float) -> None:
        named = self._named(panel)
        legend = min(len(named), 5)
        axes = self._axes(
            left + 1.3, top + 1.2, panel.width - 1.7, panel.height - 2.4 - 0.55 * legend, facecolor=_PANEL
        )
        self._style(axes, panel.unit)
        start, end = self._span
        if panel.stacked and named:
            times = np.arange(math.floor(start), end, max(1.0, round((end - start) / 150)))
            heights = [
                np.interp(times, series.times, np.nan_to_num(series.values), left=0, right=0) for _, _, series in named
            ]
            axes.stackplot(date2num(_dates(times)), heights, colors=[color for _, color, _ in named], alpha=0.6, lw=0)
        else:
            for _, color, series in named:
                axes.plot(date2num(_dates(series.times)), series.values, color=color, lw=1)
        axes.set_xlim(*date2num(_dates(self._span)))
        axes.set_ylim(0, panel.maximum or max(axes.get_ylim()[1] * 1.05, 1e-3))
        if not named:
            axes.text(0.5, 0.5, "No data", color=_DIM, ha="center", transform=axes.transAxes, fontsize=9)
        for index, (name, color, series) in enumerate(named[:legend]):
            below = top + panel.height - 0.45 - 0.55 * (legend - 1 - index)
            self._write(left + 0.3, below, "▬", size=7, color=color)
            self._write(left + 0.7, below, name[:34], size=7, color=_TEXT)
            finite = [value for value in series.values if math.isfinite(value)] or [math.nan]
            last = f"max {shown(max(finite), panel.unit)}   last {shown(finite[-1], panel.unit)}"
            self._figure.text(
                (left + panel.width - 0.3) / WIDTH, 1 - below / self._height, last, fontsize=7, color=_DIM, ha="right"
            )

    def _style(self, axes: Any, unit: Unit) -> None:
        axes.tick_params(colors=_DIM, labelsize=6.5, length=0)
        axes.grid(color=_LINE, lw=0.6)
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
        axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
        axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _stat(self, panel: Stat, left: float, top: float) -> None:
        series = self._ask(panel.queries[0])
        values = [value for value in series[0].values if math.isfinite(value)] if series else []
        color = _color_of(values[-1], panel.limits) if values else _DIM
        text = shown(values[-1], panel.unit) if values else "–"
        if len(values) > 1:
            axes = self._axes(left + 0.15, top + panel.height - 1.5, panel.width - 0.3, 1.3)
            axes.axis("off")
            axes.fill_between(range(len(values)), values, color=color, alpha=0.25, lw=0)
            axes.plot(range(len(values)), values, color=color, lw=0.8)
            axes.set_ylim(0, max(*values, 1e-9) * 1.1)
        self._figure.text(
            (left + panel.width / 2) / WIDTH,
            1 - (top + 2.35) / self._height,
            text,
            fontsize=17,
            color=color,
            ha="center",
        )

    def _heatmap(self, panel: Heatmap, left: float, top: float) -> None:
        axes = self._axes(left + 1.3, top + 1.2, panel.width - 1.7, panel.height - 2.4, facecolor=_PANEL)
        self._style(axes, panel.unit)
        buckets = sorted(self._ask(panel.queries[0]), key=lambda series: float(series.labels["le"]))
        if not buckets:
            return
        counts = np.array(
            [np.nan_to_num(series.values) for series in buckets if len(series.values) == len(buckets[0].values)]
        )
        cells = np.diff(counts, axis=0, prepend=0).clip(min=0)
        filled = np.flatnonzero(cells.max(axis=1) > 0)
        first, last = (max(filled[0] - 1, 0), min(filled[-1] + 2, len(cells))) if len(filled) else (0, len(cells))
        times = date2num(_dates(buckets[0].times))
        cells = np.ma.masked_less_equal(cells[first:last], 1e-9)
        axes.pcolormesh(times, np.arange(len(cells)), np.sqrt(cells), cmap="Blues_r", shading="nearest", vmin=0)
        axes.grid(visible=False)
        bounds = [float(series.labels["le"]) for series in buckets[first:last]]
        every = max(1, len(bounds) // 6)
        axes.set_yticks(
            range(0, len(bounds), every), ["∞" if math.isinf(b) else shown(b, panel.unit) for b in bounds[::every]]
        )

    def _table(self, panel: Table, left: float, top: float) -> None:
        rows: dict[tuple[str, ...], list[str]] = {}
        for index, (query, column) in enumerate(zip(panel.queries, panel.columns, strict=True)):
            for series in self._ask(query):
                row = rows.setdefault(tuple(series.labels.get(name, "") for name in panel.labels), [])
                row += ["–"] * (index - len(row))
                row.append(shown(series.values[-1], column.unit))
        cells = [
            [*labels, *values, *["–"] * (len(panel.columns) - len(values))] for labels, values in sorted(rows.items())
        ]
        self._cells(panel, left, top, [*panel.labels.values(), *(column.title for column in panel.columns)], cells)

    def _cells(
        self, panel: Panel, left: float, top: float, titles: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        width = (panel.width - 0.6) / len(titles)
        for index, title in enumerate(titles):
            self._write(left + 0.3 + index * width, top + 1.8, title, size=7.5, color="#6e9fff")
            for number, row in enumerate(rows[: panel.height - 2]):
                self._write(
                    left + 0.3 + index * width, top + 2.75 + number * 0.85, row[index][:30], size=8, color=_TEXT
                )

    def _text(self, panel: Text, left: float, top: float) -> None:
        lines = []
        for paragraph in panel.about.replace("**", "").replace("*", "").replace("`", "").split("\n"):
            bullet = paragraph.startswith("- ")
            wrapped = textwrap.wrap(paragraph[2:] if bullet else paragraph, int(panel.width * 8.2))
            lines += [
                ("• " if bullet and not number else "  " if bullet else "") + line
                for number, line in enumerate(wrapped)
            ]
        for number, line in enumerate(lines[: int((panel.height - 1.5) / 0.72)]):
            self._write(left + 0.4, top + 1.75 + number * 0.72, line, size=8, color=_TEXT)


def shown(value: float, unit: Unit) -> str:
    """A number as people read it."""
    if math.isnan(value):
        return "–"
    if unit == "share":
        return f"{value * 100:.3g} %"
    if unit == "seconds":
        if value >= 120:
            return f"{value / 60:.3g} min"
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    for factor, prefix in ((2**30, " GiB"), (2**20, " MiB")) if unit == "bytes" else ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{prefix}{_SUFFIXES.get(unit, '')}"
    return f"{value:.3g}{_SUFFIXES.get(unit, '')}"


def _name(query: Query, series: Series) -> str:
    """The name of a series in a legend."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), query.name)


def _color_of(value: float, limits: Limits | None) -> str:
    if limits is None:
        return _COLORS["blue"]
    return _COLORS["red" if value >= limits.error else "orange" if value >= limits.warning else "green"]


def _dates(times: Sequence[float] | Any) -> Any:
    return (np.asarray(times) * 1e6).astype("datetime64[us]")


def main() -> None:
    """Draw the dashboards into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("prometheus", help="its address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=2.0, help="how much of the time until now to show")
    parser.add_argument("--only", nargs="*", help="names of dashboards; default: all")
    arguments = parser.parse_args()
    mpl.use("Agg")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    span = (time.time() - arguments.minutes * 60, time.time())
    with closing(Prometheus(arguments.prometheus)) as prometheus:
        for dashboard in dashboards():
            if not arguments.only or dashboard.name in arguments.only:
                Page(dashboard, prometheus, span).save(arguments.folder / f"{dashboard.name}.png")


if __name__ == "__main__":
    main()

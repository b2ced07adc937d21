"""Dashboards as YAML for Perses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dashboards.panels import (
    Color,
    Dashboard,
    Heatmap,
    Info,
    Limits,
    Lines,
    Panel,
    Query,
    Row,
    Stat,
    Table,
    Text,
    Unit,
)

_PROJECT = "quire"
_FORMATS: Mapping[Unit, dict[str, Any]] = {
    "count": {"unit": "decimal", "shortValues": True},
    "share": {"unit": "percent-decimal", "decimalPlaces": 1},
    "seconds": {"unit": "seconds"},
    "bytes": {"unit": "bytes", "shortValues": True},
    "tokens": {"unit": "decimal", "shortValues": True},
    "per second": {"unit": "counts/sec"},
    "requests/s": {"unit": "requests/sec"},
    "tokens/s": {"unit": "counts/sec", "shortValues": True},
    "cores": {"unit": "decimal", "decimalPlaces": 2},
}
_COLORS: Mapping[Color, str] = {
    "green": "#56A64B",
    "yellow": "#E0B400",
    "orange": "#FF780A",
    "red": "#E02F44",
    "blue": "#3274D9",
    "purple": "#A352CC",
    "gray": "#808080",
    "p50": "#8AB8FF",
    "p95": "#3274D9",
    "p99": "#7C2EA3",
}


def text(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return str(yaml.safe_dump(_dashboard(dashboard), sort_keys=False, allow_unicode=True, width=120))


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    panels: dict[str, Any] = {}
    layouts = [_layout(row, panels) for row in dashboard.rows]
    return {
        "kind": "Dashboard",
        "metadata": {"name": dashboard.name, "project": _PROJECT},
        "spec": {
            "display": {"name": dashboard.title, "description": dashboard.about},
            "duration": "1h",
            "refreshInterval": "30s",
            "variables": _variables(),
            "panels": panels,
            "layouts": layouts,
        },
    }


def _variables() -> list[dict[str, Any]]:
    """Those of Grafana's, without the data source: Perses takes the project's or the server's default."""
    series = "quire:num_requests_running"
    return [
        _variable("job", "Job", series),
        _variable("instance", "Server", f'{series}{{job=~"$job"}}'),
        _variable("model_name", "Model", f'{series}{{job=~"$job", instance=~"$instance"}}'),
    ]


def _variable(label: str, title: str, series: str) -> dict[str, Any]:
    return {
        "kind": "ListVariable",
        "spec": {
            "name": label,
            "display": {"name": title, "hidden": False},
            "allowAllValue": True,
            "allowMultiple": True,
            "customAllValue": ".*",
            "defaultValue": "$__all",
            "sort": "alphabetical-asc",
            "plugin": {
                "kind": "PrometheusLabelValuesVariable",
                "spec": {"labelName": label, "matchers": [series]},
            },
        },
    }


def _layout(row: Row, panels: dict[str, Any]) -> dict[str, Any]:
    """The grid of a row, whose panels are added to `panels`."""
    items = []
    for panel, left, top in row.places():
        name = f"panel-{len(panels) + 1}"
        panels[name] = _panel(panel)
        place = {"x": left, "y": top, "width": panel.width, "height": panel.height}
        items.append({**place, "content": {"$ref": f"#/spec/panels/{name}"}})
    return {"kind": "Grid", "spec": {"display": {"title": row.title, "collapse": {"open": True}}, "items": items}}


def _panel(panel: Panel) -> dict[str, Any]:
    kind, spec = _plugin(panel)
    described = {"name": panel.title}
    if panel.queries:
        described["description"] = panel.description
    result: dict[str, Any] = {"display": described, "plugin": {"kind": kind, "spec": spec}}
    if panel.queries:
        result["queries"] = [_query(query) for query in panel.queries]
    return {"kind": "Panel", "spec": result}


def _query(query: Query) -> dict[str, Any]:
    spec = {"query": query.expression, "seriesNameFormat": query.name}
    return {"kind": "TimeSeriesQuery", "spec": {"plugin": {"kind": "PrometheusTimeSeriesQuery", "spec": spec}}}


def _plugin(panel: Panel) -> tuple[str, dict[str, Any]]:
    """The kind of a panel and its settings."""
    match panel:
        case Lines():
            return "TimeSeriesChart", _lines(panel)
        case Stat():
            return "StatChart", _stat(panel)
        case Heatmap():
            return "HeatMapChart", {"yAxisFormat": _FORMATS[panel.unit], "countFormat": _FORMATS["per second"]}
        case Table():
            return "Table", _table(panel)
        case Info():
            return "Table", _labels(panel)
        case Text():
            return "Markdown", {"text": panel.about}
    raise TypeError(f"a panel that the writer for Perses does not know: {panel}")


def _lines(panel: Lines) -> dict[str, Any]:
    axis: dict[str, Any] = {"format": _FORMATS[panel.unit], "min": 0}
    if panel.maximum is not None:
        axis["max"] = panel.maximum
    visual: dict[str, Any] = {"lineWidth": 1, "areaOpacity": 0.4 if panel.stacked else 0.08}
    if panel.stacked:
        visual["stack"] = "all"
    spec: dict[str, Any] = {
        "legend": {"position": "bottom", "mode": "table", "values": ["mean", "max", "last-number"]},
        "yAxis": axis,
        "visual": visual,
    }
    if panel.limits:
        spec["thresholds"] = _thresholds(panel.limits)
    if colors := _fixed_colors(panel.queries):
        spec["querySettings"] = colors
    return spec


def _fixed_colors(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """Colors of queries; Perses cannot color single series of one query."""
    return [
        {"queryIndex": index, "colorMode": "fixed", "colorValue": _COLORS[query.color]}
        for index, query in enumerate(queries)
        if query.color
    ]


def _thresholds(limits: Limits) -> dict[str, Any]:
    steps: dict[float, Color] = {
        limits.warning: "orange",
        limits.error: "red",
    }  # of two that are equal, the error counts
    return {
        "defaultColor": _COLORS["green"],
        "steps": [{"value": value, "color": _COLORS[color]} for value, color in steps.items()],
    }


def _stat(panel: Stat) -> dict[str, Any]:
    spec: dict[str, Any] = {"calculation": "last-number", "format": _FORMATS[panel.unit], "sparkline": {}}
    if panel.limits:
        spec["thresholds"] = _thresholds(panel.limits)
    return spec


def _table(panel: Table) -> dict[str, Any]:
    labels = [{"name": name, "header": title} for name, title in panel.labels.items()]
    values = [
        {"name": f"value #{index}", "header": column.title, "format": _FORMATS[column.unit], "align": "right"}
        for index, column in enumerate(panel.columns, 1)
    ]
    hidden = [{"name": "timestamp", "hide": True}]
    transforms = [
        {"kind": "MergeSeries", "spec": {}},
        {"kind": "JoinByColumnValue", "spec": {"columns": list(panel.labels)}},
    ]
    return {"density": "compact", "columnSettings": [*labels, *values, *hidden], "transforms": transforms}


def _labels(panel: Info) -> dict[str, Any]:
    labels = [{"name": name, "header": title} for name, title in panel.labels.items()]
    hidden = [{"name": name, "hide": True} for name in ("timestamp", "value")]
    return {"density": "compact", "columnSettings": [*labels, *hidden]}

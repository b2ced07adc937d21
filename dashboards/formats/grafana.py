"""Dashboards as JSON for Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
    Row,
    Stat,
    Table,
    Text,
    Unit,
)

_TAG = "quire"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS: Mapping[Unit, str] = {
    "count": "short",
    "share": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "short",
    "per second": "suffix:/s",
    "requests/s": "reqps",
    "tokens/s": "suffix: tok/s",
    "cores": "suffix: cores",
}
# Names of Grafana's palette, which differ between the light and the dark theme.
_COLORS: Mapping[Color, str] = {
    "green": "green",
    "yellow": "yellow",
    "orange": "orange",
    "red": "red",
    "blue": "blue",
    "purple": "purple",
    "gray": "text",
    "p50": "super-light-blue",
    "p95": "blue",
    "p99": "dark-purple",
}


def text(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(_dashboard(dashboard), indent=1, ensure_ascii=False) + "\n"


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": [_TAG],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # the crosshair is shared by all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "links": [
            {
                "type": "dashboards",
                "title": "Quire",
                "tags": [_TAG],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "icon": "external link",
                "targetBlank": False,
            }
        ],
        "annotations": {"list": [_annotation(*annotation) for annotation in _ANNOTATIONS]},
        "templating": {"list": _variables()},
        "panels": _panels(dashboard.rows),
    }


_ANNOTATIONS = (
    (
        "Alerts",
        "red",
        'ALERTS{alertname=~"Quire.*", alertstate="firing", instance=~"$instance"}',
        "{{alertname}} {{model_name}}",
    ),
    (
        "Starts of servers",
        "blue",
        'changes(process_start_time_seconds{job=~"$job", instance=~"$instance"}[$__interval]) > 0',
        "{{instance}} started",
    ),
)


def _annotation(name: str, color: str, expression: str, title: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": _DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expression,
        "titleFormat": title,
        "useValueForTime": False,
    }


def _variables() -> list[dict[str, Any]]:
    running = "quire:num_requests_running"
    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1},
        _variable("job", "Job", f"label_values({running}, job)"),
        _variable("instance", "Server", f'label_values({running}{{job=~"$job"}}, instance)'),
        _variable("model_name", "Model", f'label_values({running}{{job=~"$job", instance=~"$instance"}}, model_name)'),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: Iterable[Row]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": place,
                "id": len(panels) + 1,
            }
        )
        top += 1
        for panel, left, below in row.places():
            place = {"x": left, "y": top + below, "w": panel.width, "h": panel.height}
            panels.append({**_panel(panel), "gridPos": place, "id": len(panels) + 1})
        top += row.height
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    match panel:
        case Lines():
            return _lines(panel)
        case Stat():
            return _stat(panel)
        case Heatmap():
            return _heatmap(panel)
        case Table():
            return _table(panel)
        case Info():
            return _info(panel)
        case Text():
            return {"type": "text", "title": panel.title, "options": {"mode": "markdown", "content": panel.about}}
    raise TypeError(f"a panel that Grafana's writer does not know: {panel}")


def _queried(kind: str, panel: Panel, **settings: Any) -> dict[str, Any]:
    """A panel with queries; `settings` of each of them."""
    targets = [_target(index, query, **settings) for index, query in enumerate(panel.queries)]
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": targets,
    }


def _target(index: int, query: Query, **settings: Any) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": _ref(index),
        "datasource": _DATASOURCE,
        "expr": query.expression,
        "legendFormat": query.name,
    }
    if query.exemplars:
        target["exemplar"] = True
    return target | settings


def _ref(index: int) -> str:
    return chr(ord("A") + index)


def _lines(panel: Lines) -> dict[str, Any]:
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
    }
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "lineWidth": 0}
    defaults: dict[str, Any] = {
        "unit": _UNITS[panel.unit],
        "min": 0,
        "color": {"mode": "palette-classic"},
        "custom": custom,
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.limits:
        defaults["thresholds"] = _steps(panel.limits)
        custom["thresholdsStyle"] = {"mode": "dashed"}
    colors = {query.name: query.color for query in panel.queries if query.color} | dict(panel.colors)
    single = len(panel.queries) == 1 and "{{" not in panel.queries[0].name
    return {
        **_queried("timeseries", panel),
        "fieldConfig": {"defaults": defaults, "overrides": [_colored(name, color) for name, color in colors.items()]},
        "options": {
            "legend": {
                "showLegend": not single,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["mean", "max", "lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _colored(name: str, color: Color) -> dict[str, Any]:
    value = {"mode": "fixed", "fixedColor": _COLORS[color]}
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "color", "value": value}]}


def _steps(limits: Limits | None) -> dict[str, Any]:
    steps: list[tuple[str, float | None]] = [("blue", None)]
    if limits:
        steps = [("green", None), ("orange", limits.warning), ("red", limits.error)]
    if limits and limits.warning == limits.error:
        del steps[1]
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}


def _stat(panel: Stat) -> dict[str, Any]:
    defaults = {
        "unit": _UNITS[panel.unit],
        "min": 0,
        "color": {"mode": "thresholds"},
        "thresholds": _steps(panel.limits),
        "noValue": "–",
    }
    return {
        **_queried("stat", panel),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _heatmap(panel: Heatmap) -> dict[str, Any]:
    return {
        **_queried("heatmap", panel, format="heatmap"),
        "options": {
            "calculate": False,
            "yAxis": {"unit": _UNITS[panel.unit], "axisPlacement": "left"},
            "color": {"mode": "scheme", "scheme": "Blues", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "cellGap": 1,
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": True},
        },
    }


def _table(panel: Table) -> dict[str, Any]:
    titles = {f"Value #{_ref(index)}": column.title for index, column in enumerate(panel.columns)}
    columns = dict(panel.labels) | titles
    overrides = []
    for column in panel.columns:
        properties: list[dict[str, Any]] = [{"id": "unit", "value": _UNITS[column.unit]}]
        if column.limits:
            properties += [
                {"id": "thresholds", "value": _steps(column.limits)},
                {"id": "color", "value": {"mode": "thresholds"}},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ]
        overrides.append({"matcher": {"id": "byName", "options": column.title}, "properties": properties})
    return {
        **_queried("table", panel, format="table", instant=True, range=False),
        "fieldConfig": {"defaults": {"decimals": 2, "noValue": "–"}, "overrides": overrides},
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [{"id": "merge", "options": {}}, _organized(columns, excluded=("Time",))],
    }


def _info(panel: Info) -> dict[str, Any]:
    return {
        **_queried("table", panel, format="table", instant=True, range=False),
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [_organized(panel.labels, excluded=("Time", "Value"))],
    }


def _organized(columns: Mapping[str, str], *, excluded: Iterable[str]) -> dict[str, Any]:
    options = {
        "excludeByName": dict.fromkeys(excluded, True),
        "indexByName": {name: index for index, name in enumerate(columns)},
        "renameByName": dict(columns),
    }
    return {"id": "organize", "options": options}

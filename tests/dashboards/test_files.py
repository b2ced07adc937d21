"""The files of dashboards and alerts: up to date, of metrics that exist, and complete."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.__main__ import FOLDER, dashboards, files
from dashboards.alerts import GROUPS
from dashboards.metric_names import UnknownMetricError, named_in
from dashboards.panels import WIDTH, Dashboard
from tests.support.keys import bearer
from tests.support.server import running_server

_ROOT = Path(__file__).parents[2]
_ALERTS = [alert for alerts in GROUPS.values() for alert in alerts]
_METRIC = re.compile(r"\b(?:quire:|http_|process_)\w+")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_GROUPING = re.compile(r"(?:by|on) \(([^)]*)\)")
_OF_SCRAPES = {"job", "instance"}


def test_the_files_are_up_to_date() -> None:
    texts = files()
    old = [path.name for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not old, "run: python -m dashboards"
    folders = ((FOLDER / "grafana", "*.json"), (FOLDER / "perses", "*.yaml"))
    left_over = {path for folder, pattern in folders for path in folder.glob(pattern)} - set(texts)
    assert not left_over


async def test_expressions_name_metrics_and_labels_that_a_server_exports(tmp_path: Path) -> None:
    """A metric without a sample yet, such as requests by status, counts with its first one."""
    async with running_server(
        tmp_path, kv_cache_metrics=True, speculative_method="ngram", api_key=("key-load",), requests_per_minute=1
    ) as server:
        for _ in range(2):  # the second is one too many
            body = {"prompt": "abcd", "max_tokens": 2}
            await server.post("/v1/completions", body, headers=bearer("load"))
        labels = labels_of((await server.http.get("/metrics", headers=bearer("load"))).text)
    wrong = []
    for place, expression in expressions():
        names = _METRIC.findall(expression)
        wrong += [f"{place}: no {name}" for name in names if name not in labels]
        known = _OF_SCRAPES.union(*(labels[name] for name in names))
        for name, matchers in _SELECTOR.findall(expression):
            used = set(re.findall(r"(\w+)=", matchers)) - _OF_SCRAPES
            wrong += [f"{place}: {name} has no {label}" for label in used - labels[name] if name in names]
        grouped = {label.strip() for group in _GROUPING.findall(expression) for label in group.split(",")} - {""}
        wrong += [f"{place}: no metric has {label}" for label in grouped - known]
    assert not wrong


def test_a_metric_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownMetricError, match="quire:gone_total in 'rate"):
        named_in(["rate(quire:gone_total[5m])"])
    assert list(named_in(["quire:num_requests_running + quire:generation_tokens_total"])) == [
        "quire:num_requests_running",
        "quire:generation_tokens_total",
    ]


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda dashboard: dashboard.name)
def test_a_dashboard_fits_its_grid(dashboard: Dashboard) -> None:
    panels = [panel for panel in read(dashboard)["panels"] if panel["type"] != "row"]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= WIDTH for place in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    ids = [panel["id"] for panel in read(dashboard)["panels"]]
    assert len(set(ids)) == len(ids)
    for row in dashboard.rows:
        titles = [panel.title for panel in row.panels]
        assert len(set(titles)) == len(titles)
        assert all(panel.about.strip().endswith((".", "?")) for panel in row.panels)


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda dashboard: dashboard.name)
def test_grafana_and_perses_show_the_same(dashboard: Dashboard) -> None:
    perses = yaml.safe_load((FOLDER / "perses" / f"{dashboard.name}.yaml").read_text(encoding="utf-8"))["spec"]
    grafana = [panel for panel in read(dashboard)["panels"] if panel["type"] != "row"]
    shown = [item["content"]["$ref"].rpartition("/")[2] for grid in perses["layouts"] for item in grid["spec"]["items"]]
    of_perses = [
        [query["spec"]["plugin"]["spec"]["query"] for query in perses["panels"][name]["spec"].get("queries", ())]
        for name in shown
    ]
    assert of_perses == [[target["expr"] for target in panel.get("targets", ())] for panel in grafana]
    assert [perses["panels"][name]["spec"]["display"]["name"] for name in shown] == [
        panel["title"] for panel in grafana
    ]


def test_every_alert_is_explained_and_tested() -> None:
    page = (_ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [alert.name for alert in _ALERTS]
    tests = yaml.safe_load((FOLDER / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    assert {test["name"] for test in tests} >= {alert.name for alert in _ALERTS}


def test_grafana_and_prometheus_find_what_they_read() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert all((FOLDER / "prometheus" / name).exists() for name in prometheus["rule_files"])
    assert all("quire" in job["job_name"] for job in prometheus["scrape_configs"])
    provisioning = FOLDER / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "quire.yaml").read_text(encoding="utf-8"))["datasources"]
    (traces,) = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert traces["datasourceUid"] in {source["uid"] for source in sources}
    assert yaml.safe_load((provisioning / "dashboards" / "quire.yaml").read_text(encoding="utf-8"))["providers"]


def expressions() -> Iterator[tuple[str, str]]:
    """All expressions of dashboards and alerts, with the places where they are."""
    for dashboard in dashboards():
        for panel in dashboard.panels:
            yield from ((f"{dashboard.name}, {panel.title}", query.expression) for query in panel.queries)
        content = read(dashboard)
        yield from ((f"{dashboard.name}, {note['name']}", note["expr"]) for note in content["annotations"]["list"])
    yield from ((alert.name, alert.expression) for alert in _ALERTS)


def read(dashboard: Dashboard) -> Any:
    """A dashboard's file for Grafana."""
    return json.loads((FOLDER / "grafana" / f"{dashboard.name}.json").read_text(encoding="utf-8"))


def labels_of(page: str) -> dict[str, set[str]]:
    """The labels of all samples on a page of metrics."""
    labels: dict[str, set[str]] = defaultdict(set)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels[name.split(" ")[0]] |= set(re.findall(r'(\w+)="', rest))
    return labels

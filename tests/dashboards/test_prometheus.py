"""Dashboards and alerts in Debian's Prometheus, which scrapes a server under load.

The variable PICTURES names a folder for pictures of the dashboards.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from dashboards.__main__ import FOLDER, dashboards
from dashboards.alerts import GROUPS
from dashboards.prometheus_api import Prometheus
from tests.support.keys import write_keys
from tests.support.mixed_load import ARGUMENTS, KEYS, MixedLoad
from tests.support.process import eventually, free_port, serving

SECONDS = float(os.environ.get("LOAD_SECONDS", "60"))
_PANELS = {
    f"{dashboard.name}, {row.title}, {panel.title}": [query.expression for query in panel.queries]
    for dashboard in dashboards()
    for row in dashboard.rows
    for panel in row.panels
}
_ALERTS = {alert.name: alert for alerts in GROUPS.values() for alert in alerts}
_LABELS = 'job=~".*", instance=~".*", model_name=~".*"'
_GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("engine_sleep_state", "cache_config_info"),
)
_COUNTERS = (
    *("request_success", "prompt_tokens", "generation_tokens", "prompt_tokens_cached", "num_preemptions"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
_RATIOS = (
    *(("prefix_cache_hits", "prefix_cache_queries"), ("mm_cache_hits", "mm_cache_queries")),
    *(("prompt_tokens_cached", "prompt_tokens"), ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")),
)
_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
    *("request_prefill_kv_computed_tokens", "request_max_num_generation_tokens"),
)
# The forms of the expressions of vLLM's dashboards, with each of the metrics that they are used for.
_FORMS = (
    *(f"sum by (model_name) (vllm:{name}{{{_LABELS}}})" for name in _GAUGES),
    *(f"sum by (model_name, instance) (rate(vllm:{name}_total{{{_LABELS}}}[$__rate_interval]))" for name in _COUNTERS),
    *(
        f"sum(rate(vllm:{part}_total{{{_LABELS}}}[1m])) / (sum(rate(vllm:{whole}_total{{{_LABELS}}}[1m])) > 0)"
        for part, whole in _RATIOS
    ),
    *(f"histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket{{{_LABELS}}}[1m])))" for name in _HISTOGRAMS),
    *(f"sum(rate(vllm:{name}_sum[1m])) / sum(rate(vllm:{name}_count[1m]))" for name in _HISTOGRAMS),
    'sum(rate(vllm:time_to_first_token_seconds_bucket{le="1.0"}[1m]))',
    'sum(rate(vllm:request_time_per_output_token_seconds_bucket{le="0.1"}[1m]))',
    'sum by (finished_reason) (increase(vllm:request_success_total{job=~".*"}[$__range]))',
    'sum(rate(http_requests_total{status="5xx"}[1m])) / sum(rate(http_requests_total[1m]))',
    "sum by (handler) (rate(http_request_duration_seconds_sum[1m]))",
    "(time() - process_start_time_seconds) * on (job, instance) group_left (model_name) "
    'group by (job, instance, model_name) (vllm:num_requests_running{model_name="quire-nano"})',  # one of the instance
)
pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus and promtool"),
]


@dataclass(frozen=True)
class Loaded:
    """A Prometheus that has watched a server under load, and between which times."""

    prometheus: Prometheus
    url: str
    start: float
    end: float

    def values(self, expression: str) -> list[float]:
        """All numbers that an expression had."""
        answer = self.prometheus.ask(expression, self.start, self.end)
        return [value for series in answer for value in series.values if not math.isnan(value)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("prometheus")
    keys = write_keys(folder / "keys.toml", **KEYS)
    with (
        serving(*ARGUMENTS, "--api-key-file", str(keys)) as server,
        scraping(folder, server.url.removeprefix("http://")) as url,
        closing(Prometheus(url)) as prometheus,
    ):
        eventually(lambda: bool(prometheus.ask("up == 1", time.time() - 1, time.time())))
        start = time.time()
        asyncio.run(MixedLoad(server.url, SECONDS).run())
        yield Loaded(prometheus, url, start + 5, start + SECONDS)


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus with the repository's settings that scrapes a server every second; its address."""
    settings = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["scrape_configs"][0] |= {
        "static_configs": [{"targets": [target]}],
        "authorization": {"credentials": "key-load"},
    }
    settings["rule_files"] = [str(FOLDER / "prometheus" / name) for name in settings["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--enable-feature=exemplar-storage"),
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            eventually(lambda: answers(f"http://{address}/-/ready"))
            yield f"http://{address}"
        finally:
            process.terminate()


def answers(url: str) -> bool:
    """Whether an address can be read."""
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("panel", _PANELS)
def test_every_query_of_a_panel_returns_data(loaded: Loaded, panel: str) -> None:
    assert not [expression for expression in _PANELS[panel] if not loaded.values(expression)]


@pytest.mark.parametrize("name", _ALERTS)
def test_an_alert_has_something_to_compare(loaded: Loaded, name: str) -> None:
    assert loaded.values(_ALERTS[name].measured)
    loaded.values(_ALERTS[name].expression)


def test_prometheus_evaluates_the_rules(loaded: Loaded) -> None:
    groups = httpx.get(f"{loaded.url}/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == set(_ALERTS)
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    assert {rules[name]["state"] for name in ("QuireDown", "QuireCorrupted", "QuireEngineStalled")} == {"inactive"}


def test_the_phases_of_a_sequence_add_up_to_its_time(loaded: Loaded) -> None:
    """All but its media and its grammar, whose times come before."""
    panel = next(panel for name, panel in _PANELS.items() if name.endswith("Mean time of a sequence"))
    at = loaded.end - 5
    parts = [loaded.prometheus.ask(expression, at, at) for expression in panel[2:]]
    selection = '{job=~"$job"}[$__rate_interval]))'
    whole = loaded.prometheus.ask(
        f"sum(rate(quire:e2e_request_latency_seconds_sum{selection} / "
        f"sum(rate(quire:e2e_request_latency_seconds_count{selection}",
        at,
        at,
    )
    assert sum(series.values[0] for (series,) in parts) == pytest.approx(whole[0].values[0], rel=1e-6)


@pytest.mark.parametrize("expression", _FORMS)
def test_the_forms_of_vllms_dashboards_return_data(loaded: Loaded, expression: str) -> None:
    assert loaded.values(expression)


def test_promtool_accepts_the_files() -> None:
    folder = FOLDER / "prometheus"
    for command in (
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        ended = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_pictures_can_be_drawn(loaded: Loaded, tmp_path: Path) -> None:
    import matplotlib as mpl

    from dashboards.pictures import Page

    mpl.use("Agg")
    folder = Path(os.environ.get("PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in dashboards():
        Page(dashboard, loaded.prometheus, (loaded.start, loaded.end)).save(folder / f"{dashboard.name}.png")
        assert (folder / f"{dashboard.name}.png").stat().st_size > 20_000

"""Writes the generated files of this folder: `python -m dashboards`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dashboards import alerts
from dashboards.boards import errors, kv_cache, media, models, overview, speech, why_slow
from dashboards.formats import grafana, perses, rules
from dashboards.panels import Dashboard

FOLDER = Path(__file__).parent
_HEAD = "# Written by `python -m dashboards`.\n"


def dashboards() -> tuple[Dashboard, ...]:
    """All dashboards."""
    return tuple(module.dashboard() for module in (overview, why_slow, models, kv_cache, speech, media, errors))


def files() -> Mapping[Path, str]:
    """The generated files and their texts."""
    texts = {FOLDER / "prometheus" / "alerts.yml": _HEAD + rules.text(alerts.GROUPS)}
    for dashboard in dashboards():
        texts[FOLDER / "grafana" / f"{dashboard.name}.json"] = grafana.text(dashboard)
        texts[FOLDER / "perses" / f"{dashboard.name}.yaml"] = _HEAD + perses.text(dashboard)
    return texts


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")

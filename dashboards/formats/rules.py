"""Alerts as a file of rules for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from dashboards.alerts import Alert


def text(groups: Mapping[str, tuple[Alert, ...]]) -> str:
    """The file of groups of alerts."""
    rules = [{"name": name, "rules": [_rule(alert) for alert in alerts]} for name, alerts in groups.items()]
    return str(yaml.safe_dump({"groups": rules}, sort_keys=False, allow_unicode=True, width=120))


def _rule(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.lasting != "0m":
        rule["for"] = alert.lasting
    annotations = {"summary": alert.summary, "description": alert.advice, "runbook": alert.runbook}
    return {**rule, "labels": {"severity": alert.severity}, "annotations": annotations}

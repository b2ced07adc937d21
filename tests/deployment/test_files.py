"""What images, compose file and manifests say of Quire is true, and they agree with each other."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from typing import Any

import jsonschema
import pytest
import yaml

from quire.app.middleware import PROBE_PATHS
from quire.config.commands import Serve
from quire.config.environment import misspelt
from quire.metrics.prometheus import Metrics
from tests.support.deployment import (
    CHART,
    DOCKER,
    DOCKERFILES,
    MANIFESTS,
    ROOT,
    document,
    documents,
    pod_spec,
    server,
)

_DIGEST = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
_SHUTDOWN_TIMEOUT = Serve.model_fields["shutdown_timeout"].default
_FORCED = 5  # seconds after --shutdown-timeout until the process ends by force
_DEPLOYMENT = document(MANIFESTS / "deployment.yaml")
_VALUES = document(CHART / "values.yaml")
_SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def _dockerfile(name: str) -> str:
    return (DOCKER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_bases_are_pinned_by_digest(name: str) -> None:
    (base,) = re.findall(r"^ARG PYTHON=(.*)$", _dockerfile(name), re.MULTILINE)
    assert _DIGEST.fullmatch(base)
    assert set(re.findall(r"^FROM (\S+)", _dockerfile(name), re.MULTILINE)) == {"${PYTHON}"}


def test_other_images_are_pinned_by_digest() -> None:
    images = [service["image"] for service in document(DOCKER / "compose.yaml")["services"].values()]
    assert [image for image in images if not _DIGEST.fullmatch(image)] == ["quire"]


def test_all_that_dockerfiles_copy_is_in_the_context() -> None:
    """`.dockerignore` leaves everything else out."""
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    }
    copied = set()
    for name in DOCKERFILES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", _dockerfile(name), re.MULTILINE):
            copied |= set(sources.split())
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("extras", ["", "video,mcp"])
def test_the_layer_of_dependencies_has_all_of_them(
    extras: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["requirements.py", extras])
    runpy.run_path(str(DOCKER / "requirements.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = list(project["dependencies"])
    for extra in extras.split(",") if extras else []:
        expected += project["optional-dependencies"][extra]
    assert capsys.readouterr().out.splitlines() == expected


def test_variables_are_settings() -> None:
    compose = document(DOCKER / "compose.yaml")["services"]["quire"]["environment"]
    pods = [variable["name"] for variable in server(_DEPLOYMENT)["env"]]
    images = [name for file in DOCKERFILES for name in re.findall(r"^ *(?:ENV )?(QUIRE_\w+)=", _dockerfile(file), re.M)]
    names = [*compose, *pods, *images]
    assert {"QUIRE_HOST", "QUIRE_API_KEY", "QUIRE_SHUTDOWN_TIMEOUT"} <= set(names)
    assert not list(misspelt(dict.fromkeys(names, "1"), Serve.model_fields))


def test_probes_need_no_key() -> None:
    probes = {
        name: server(_DEPLOYMENT)[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert set(probes.values()) <= PROBE_PATHS


def test_a_pod_has_time_to_drain() -> None:
    container = server(_DEPLOYMENT)
    _, before = container["lifecycle"]["preStop"]["exec"]["command"]
    (timeout,) = [variable["value"] for variable in container["env"] if variable["name"] == "QUIRE_SHUTDOWN_TIMEOUT"]
    assert pod_spec(_DEPLOYMENT)["terminationGracePeriodSeconds"] > int(before) + int(timeout) + _FORCED


def test_compose_waits_for_the_drain() -> None:
    period = document(DOCKER / "compose.yaml")["services"]["quire"]["stop_grace_period"]
    assert int(period.removesuffix("s")) > _SHUTDOWN_TIMEOUT + _FORCED


def test_the_autoscaler_reads_a_metric_that_the_adapter_makes_of_one_of_ours() -> None:
    (rule,) = document(MANIFESTS / "optional" / "prometheus-adapter.yaml")["rules"]["custom"]
    series = rule["seriesQuery"].partition("{")[0]
    exported = {
        metric.name.replace("quire:", "vllm:")
        for metric, alias in Metrics(max_model_len=1, vllm_names=False).families()
        if alias
    }
    assert series in exported
    assert re.fullmatch(rule["name"]["matches"], series)
    (metric,) = document(MANIFESTS / "optional" / "horizontalpodautoscaler.yaml")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == _VALUES["autoscaling"]["metric"]


def test_default_values_fit_their_schema() -> None:
    jsonschema.Draft7Validator.check_schema(_SCHEMA)
    jsonschema.validate(_VALUES, _SCHEMA)
    assert set(_VALUES) == set(_SCHEMA["properties"]) - {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        "replica: 2",
        "cache: {type: disk}",
        "cache: {size: large}",
        "settings: {port: 9000}",
        "settings: {ssl-certfile: /tls/tls.crt}",
        "settings: {MAX_MODEL_LEN: 1}",
        "models: quire-nano",
        "gpu: {count: -1}",
        "gpu: {counts: 1}",
        "apiKey: {value: secret}",
        "service: {port: 70000}",
        "shutdownTimeout: 0",
        "networkPolicy: {enabled: 'yes'}",
    ],
)
def test_wrong_values_are_refused(wrong: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(wrong), _SCHEMA)


def test_the_chart_and_the_manifests_have_the_same_defaults() -> None:
    container, pod = server(_DEPLOYMENT), pod_spec(_DEPLOYMENT)
    claim: dict[str, Any] = document(MANIFESTS / "persistentvolumeclaim.yaml")["spec"]
    budget = document(MANIFESTS / "optional" / "poddisruptionbudget.yaml")["spec"]
    autoscaler = document(MANIFESTS / "optional" / "horizontalpodautoscaler.yaml")["spec"]
    assert container["resources"] == _VALUES["resources"]
    assert container["securityContext"] == _VALUES["securityContext"]
    assert pod["securityContext"] == _VALUES["podSecurityContext"]
    assert claim["accessModes"] == _VALUES["cache"]["accessModes"]
    assert claim["resources"]["requests"]["storage"] == _VALUES["cache"]["size"]
    assert budget["maxUnavailable"] == _VALUES["podDisruptionBudget"]["maxUnavailable"]
    assert autoscaler["behavior"] == _VALUES["autoscaling"]["behavior"]
    assert [autoscaler["minReplicas"], autoscaler["maxReplicas"]] == [
        _VALUES["autoscaling"]["minReplicas"],
        _VALUES["autoscaling"]["maxReplicas"],
    ]


def test_objects_select_the_pods() -> None:
    """Each selector of the manifests is of labels that the pods have."""
    labels = _DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    selectors = 0
    for path in [*MANIFESTS.glob("*.yaml"), *MANIFESTS.glob("optional/*.yaml")]:
        for manifest in documents(path.read_text(encoding="utf-8")):
            spec = manifest.get("spec", {})
            for selector in (spec.get("selector"), spec.get("podSelector")):
                if selector:
                    selectors += 1
                    assert selector.get("matchLabels", selector).items() <= labels, path
    assert selectors == 5

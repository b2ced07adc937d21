"""hadolint, helm, kustomize, the schemas of Kubernetes and the specification of compose files find nothing wrong."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployment import CHART, DOCKER, DOCKERFILES, MANIFESTS, ROOT, document, documents, pod_spec, server

pytestmark = pytest.mark.containers

_TOOLS = Path(__file__).parent / ".tools"
_PROGRAMS = _TOOLS / "venv" / "bin"
_VERSIONS = ("1.30", "1.37")  # of Kubernetes

# Sets of values that reach each branch of the templates.
_VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "models": ["org/model", "/models/other"],
        "settings": {
            "max-model-len": 16384,
            "kv-cache-free-memory-fraction": 0.5,
            "enable-mm-embeds": True,
            "allowed-origins": ["https://a.example", "https://b.example"],
            "media-io-kwargs": {"video": {"num_frames": 8}},
            "max-json-values": 2000000,
        },
        "apiKey": {"existingSecret": "keys"},
        "huggingFace": {"existingSecret": "keys"},
        "imagePullSecrets": [{"name": "registry"}],
        "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://tempo:4317"}],
        "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
        "extraVolumes": [{"name": "models", "hostPath": {"path": "/srv/models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "cache": {"accessModes": ["ReadWriteMany"], "storageClass": "shared"},
        "autoscaling": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podDisruptionBudget": {"enabled": True},
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        },
        "service": {"annotations": {"a": "b"}},
        "serviceAccount": {"annotations": {"a": "b"}},
        "podLabels": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "serving", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    "gpu": {
        "gpu": {"count": 2},
        "settings": {"tensor-parallel-size": 2, "num-threads": 4},
        "cache": {"type": "ephemeral"},
    },
    "small": {
        "serviceAccount": {"create": False},
        "cache": {"type": "emptyDir"},
        "replicas": 3,
        "fullnameOverride": "small",
        "strategy": {"type": "Recreate"},
    },
}


def _run(*command: str | Path, text: str = "") -> str:
    ran = subprocess.run([str(word) for word in command], input=text, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _helm(*arguments: str | Path, values: dict[str, Any], folder: Path) -> str:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return _run(_TOOLS / "helm" / "helm", *arguments, "--values", file)


def _check_objects(text: str, folder: Path) -> None:
    """Against the strict schemas of Kubernetes; objects of other APIs have none there."""
    objects = [each for each in documents(text) if "monitoring.coreos.com" not in each["apiVersion"]]
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    for version in _VERSIONS:
        _run(_PROGRAMS / "kubernetes-validate", "--strict", "--kubernetes-version", version, file)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(name: str) -> None:
    _run(_PROGRAMS / "hadolint", "--config", ROOT / ".hadolint.yaml", DOCKER / name)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files(name: str) -> None:
    script = "import sys; from compose_spec import PyCompose; PyCompose.from_json(sys.stdin.read())"
    # It knows no images with both a tag and a digest, as Docker does.
    text = re.sub(r":[\w.-]+@sha256:", "@sha256:", json.dumps(document(DOCKER / name)))
    _run(_PROGRAMS / "python", "-c", script, text=text)


def test_manifests(tmp_path: Path) -> None:
    _check_objects(_run(_PROGRAMS / "kubectl", "kustomize", MANIFESTS), tmp_path)
    for path in MANIFESTS.glob("optional/*.yaml"):
        if path.name not in ("gpu.yaml", "kv-events.yaml", "prometheus-adapter.yaml"):  # patches, and values of a chart
            _check_objects(path.read_text(encoding="utf-8"), tmp_path)


def test_the_patch_for_gpus(tmp_path: Path) -> None:
    for path in [*MANIFESTS.glob("*.yaml"), *MANIFESTS.glob("optional/*.yaml")]:
        copy = tmp_path / path.relative_to(MANIFESTS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "kustomization.yaml").open("a", encoding="utf-8") as file:
        file.write("patches:\n  - path: optional/gpu.yaml\n")
    text = _run(_PROGRAMS / "kubectl", "kustomize", tmp_path)
    _check_objects(text, tmp_path)
    (deployment,) = [each for each in documents(text) if each["kind"] == "Deployment"]
    assert server(deployment)["resources"]["limits"] == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 1}
    assert len(pod_spec(deployment)["volumes"]) == 4


@pytest.mark.parametrize("values", _VALUES)
def test_chart(values: str, tmp_path: Path) -> None:
    _helm("lint", "--strict", CHART, values=_VALUES[values], folder=tmp_path)
    _check_objects(_helm("template", "quire", CHART, values=_VALUES[values], folder=tmp_path), tmp_path)


def _rendered(values: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The objects of a release named quire, by kind."""
    text = _helm("template", "quire", CHART, values=values, folder=folder)
    return {each["kind"]: each for each in documents(text)}


def test_the_chart_makes_the_manifests(tmp_path: Path) -> None:
    """But for labels of the release, the image, the Secret, and fields that only say the default."""
    deployment = _rendered(
        {"apiKey": {"existingSecret": "quire"}, "huggingFace": {"existingSecret": "quire"}}, tmp_path
    )["Deployment"]
    plain = document(MANIFESTS / "deployment.yaml")
    container, expected = server(deployment), server(plain)
    for probe in ("startup", "readiness"):
        assert container[f"{probe}Probe"] == expected[f"{probe}Probe"]
    for name in ("lifecycle", "resources", "securityContext", "volumeMounts", "ports"):
        assert container[name] == expected[name]
    assert {variable["name"] for variable in container["env"]} == {v["name"] for v in expected["env"]} | {"QUIRE_PORT"}
    pod, expected_pod = pod_spec(deployment), pod_spec(plain)
    for name in expected_pod.keys() - {"containers"}:
        assert pod[name] == expected_pod[name]
    assert deployment["spec"]["strategy"] == plain["spec"]["strategy"]


def test_settings_become_variables(tmp_path: Path) -> None:
    container = server(_rendered(_VALUES["everything"], tmp_path)["Deployment"])
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["QUIRE_MAX_MODEL_LEN"] == "16384"
    assert variables["QUIRE_MAX_JSON_VALUES"] == "2000000"
    assert variables["QUIRE_KV_CACHE_FREE_MEMORY_FRACTION"] == "0.5"
    assert variables["QUIRE_ENABLE_MM_EMBEDS"] == "true"
    assert variables["QUIRE_ALLOWED_ORIGINS"] == "https://a.example,https://b.example"
    assert json.loads(variables["QUIRE_MEDIA_IO_KWARGS"] or "") == {"video": {"num_frames": 8}}
    assert container["args"] == ["org/model", "/models/other"]


def test_gpus(tmp_path: Path) -> None:
    deployment = _rendered(_VALUES["gpu"], tmp_path)["Deployment"]
    container = server(deployment)
    assert container["image"].endswith("-cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert [variable["value"] for variable in container["env"] if variable["name"] == "QUIRE_NUM_THREADS"] == ["4"]
    assert [toleration["key"] for toleration in pod_spec(deployment)["tolerations"]] == ["nvidia.com/gpu"]


def test_the_drain_has_time(tmp_path: Path) -> None:
    values = {"shutdownTimeout": 300, "preStopSeconds": 10}
    assert pod_spec(_rendered(values, tmp_path)["Deployment"])["terminationGracePeriodSeconds"] > 315


def test_the_server_is_selected_and_its_test_is_not(tmp_path: Path) -> None:
    objects = _rendered(_VALUES["everything"], tmp_path)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selector = objects["Service"]["spec"]["selector"]
    assert selector.items() <= labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == selector
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selector
    assert not selector.items() <= objects["Pod"]["metadata"]["labels"].items()


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="replica"):
        _rendered({"replica": 2}, tmp_path)

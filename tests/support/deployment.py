"""The files that Quire is deployed with, as documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
MANIFESTS = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "quire"


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of YAML."""
    return [document for document in yaml.safe_load_all(text) if document]


def document(path: Path) -> dict[str, Any]:
    """The only object of a YAML file."""
    (only,) = documents(path.read_text(encoding="utf-8"))
    return only


def pod_spec(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def server(deployment: dict[str, Any]) -> dict[str, Any]:
    """The container that serves."""
    (container,) = pod_spec(deployment)["containers"]
    return dict(container)

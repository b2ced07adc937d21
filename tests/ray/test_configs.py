"""The configs of Ray Serve in deploy/ray fit Quire and each other."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.ray.arguments import read_arguments
from quire.ray.proxy import ReplicaProxy

_FOLDER = Path(__file__).parents[2] / "deploy" / "ray"
_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))
    return document


def _serve_config(name: str) -> dict[str, Any]:
    document = _document(name)
    config: dict[str, Any] = (
        yaml.safe_load(document["spec"]["serveConfigV2"]) if document.get("kind") == "RayService" else document
    )
    return config


def _attribute(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(path.name for path in _FOLDER.glob("*.yaml")))
def test_a_config_names_what_there_is(name: str) -> None:
    (application,) = _serve_config(name)["applications"]
    (deployment,) = application["deployments"]

    assert callable(_attribute(application["import_path"]))
    assert deployment["name"] == "Quire"
    assert deployment["ray_actor_options"]["num_cpus"] >= 1
    assert read_arguments(application["args"]).model
    if (scaling := deployment.get("autoscaling_config")) is not None:
        assert "num_replicas" not in deployment
        assert callable(_attribute(scaling["policy"]["policy_function"]))


def test_the_pods_of_a_rayservice_have_the_middleware_and_room_for_a_replica() -> None:
    spec = _document("rayservice.yaml")["spec"]["rayClusterConfig"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert _attribute(env[_CALLBACK])()[0].cls is ReplicaProxy
    (application,) = _serve_config("rayservice.yaml")["applications"]
    cpus = application["deployments"][0]["ray_actor_options"]["num_cpus"]
    assert int(container["resources"]["limits"]["cpu"]) >= cpus
    grace = pods[1]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > read_arguments(application["args"]).shutdown_timeout + 5

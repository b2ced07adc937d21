"""Values of production-stack's chart: its router finds the pods of our manifests."""

from __future__ import annotations

import yaml

from tests.support.deployment import MANIFESTS, ROOT


def test_the_router_looks_for_the_pods_at_their_port() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "production-stack" / "values.yaml").read_text())
    template = yaml.safe_load((MANIFESTS / "deployment.yaml").read_text())["spec"]["template"]
    arguments = values["routerSpec"]["extraArgs"]
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    label, _, value = options["--k8s-label-selector"].partition("=")
    (container,) = template["spec"]["containers"]
    assert template["metadata"]["labels"][label] == value
    assert int(options["--k8s-port"]) in [port["containerPort"] for port in container["ports"]]

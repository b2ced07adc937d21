"""--kv-transfer-config: vLLM's names, and hosts that blocks are read from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.kv_transfer import is_allowed_host


def config(**fields: Any) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", **fields})


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("{}x", "--kv-transfer-config expects a JSON object with kv_connector, kv_role"),
        ('{"kv_role": "kv_both"}', "kv_connector: Field required"),
        (config(kv_role="both"), "kv_role: Input should be 'kv_producer', 'kv_consumer' or 'kv_both'"),
        (config(kv_rank=0), "kv_rank: Extra inputs are not permitted"),
        (config(kv_ip="::"), "it must be an address by which decoders reach this server"),
        (config(kv_ip="*"), "it must be an address by which decoders reach this server"),
        (config(kv_connector_extra_config={"backends": ["UCX"]}), "kv_connector_extra_config.backends"),
        (config(kv_connector_extra_config={"allowed_hosts": ["10.0.0.1/8"]}), "is no network"),
        (config(kv_connector="LMCacheConnectorV1"), "kv_connector: Input should be 'QuireConnector'"),
    ],
)
def test_what_is_not_supported_is_named(value: str, error: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config expects a JSON object with kv_connector") as refusal:
        Serve.parse(["m", "--kv-transfer-config", value])
    assert error in str(refusal.value)


def test_without_the_setting_nothing_is_transferred() -> None:
    assert Serve.parse(["m"]).kv_transfer is None
    transfer = Serve.parse(["m", "--kv-transfer-config", config(kv_role="kv_consumer")]).kv_transfer
    assert transfer is not None
    assert (transfer.sends, transfer.receives, transfer.kv_load_failure_policy) == (False, True, "fail")


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("prefill-0", True),
        ("prefill-1", False),
        ("fd00::1", True),
        ("fd01::1", False),
        ("10.0.0.1.example", False),
        ("", False),
        ("0x0a010203", False),
    ],
)
def test_hosts(host: str, is_allowed: bool) -> None:
    assert is_allowed_host(host, ("10.0.0.0/8", "prefill-0", "fd00::/16")) == is_allowed

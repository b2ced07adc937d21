"""KVTransferConfig: the value of --kv-transfer-config, with vLLM's names."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from quire.config.types import JsonObject, Seconds, json_object_of

SecondsOfADay = Annotated[Seconds, Field(le=86_400)]


def _check_own_host(value: str) -> str:
    try:
        is_wildcard = ipaddress.ip_address(value).is_unspecified
    except ValueError:
        is_wildcard = value in ("", "*")
    if is_wildcard:
        raise ValueError("it must be an address by which decoders reach this server, such as 10.0.0.5")
    return value


def _check_hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        if "/" in entry:
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(f"{entry!r} is no network, such as 10.0.0.0/8: {error}") from error
    return value


class ConnectorConfig(BaseModel):
    """What vLLM leaves to a connector. The names are Quire's.

    Attributes:
        allowed_hosts: names, addresses and networks that KV blocks are read from.
        abort_request_timeout: seconds after which a prefiller frees blocks that nobody has read.
        held_share: most of the KV cache that a prefiller keeps for decoders.
        load_timeout: seconds that a decoder waits for the blocks of a request.
        max_connections: of decoders to a prefiller.
        secret_file: a file whose content prefillers and decoders have in common; others are refused.
        tls_certfile, tls_keyfile: certificate and key of a prefiller, in PEM; its connections are encrypted.
        tls_ca_file: certificates of the authorities by which a decoder knows prefillers, in PEM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_hosts: Annotated[tuple[str, ...], AfterValidator(_check_hosts)] = ("127.0.0.0/8", "::1/128", "localhost")
    abort_request_timeout: SecondsOfADay = 480.0
    held_share: Annotated[float, Field(gt=0, le=0.9)] = 0.5
    load_timeout: SecondsOfADay = 60.0
    max_connections: Annotated[int, Field(ge=1, le=4096)] = 64
    secret_file: Path | None = None
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    tls_ca_file: Path | None = None

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.tls_keyfile is not None and self.tls_certfile is None:
            raise ValueError("tls_keyfile needs tls_certfile")
        return self


class KVTransferConfig(BaseModel):
    """How KV blocks are sent to other servers, and read from them.

    Attributes:
        kv_connector: both names mean the same; the second is that of configurations for vLLM.
        kv_role: whether blocks are sent, read, or both.
        engine_id: name of this server for its peers; None: a random one.
        kv_ip: address that a prefiller listens at, and tells decoders.
        kv_port: its port; that of replica R is higher by R.
        kv_load_failure_policy: what becomes of a request whose blocks cannot be read.
        kv_buffer_device: where blocks wait to be sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_connector: Literal["QuireConnector", "NixlConnector"]
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_ip: Annotated[str, Field(max_length=255), AfterValidator(_check_own_host)] = "127.0.0.1"
    kv_port: Annotated[int, Field(ge=0, lt=1 << 16)] = 14579
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_buffer_device: Literal["cpu"] = "cpu"
    kv_connector_extra_config: ConnectorConfig = ConnectorConfig()

    @property
    def sends(self) -> bool:
        """Whether the server keeps blocks for others, and sends them."""
        return self.kv_role != "kv_consumer"

    @property
    def receives(self) -> bool:
        """Whether the server reads blocks of others."""
        return self.kv_role != "kv_producer"


def is_allowed_host(host: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a host is among some names, addresses and networks."""
    if host in allowed:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any("/" in entry and address in ipaddress.ip_network(entry) for entry in allowed)


KVTransferOption = Annotated[JsonObject, *json_object_of(KVTransferConfig)]

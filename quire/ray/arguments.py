"""Arguments of a Serve config: the settings of `quire serve`, without those that Ray decides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.options import ConnectionOptions, ParallelOptions, TlsOptions

_LISTENER = "Ray's proxies listen, as http_options of the Serve config says"
_REPLICAS = [name for name in ParallelOptions.model_fields if name.startswith(("data_parallel", "enable_elastic"))]
_NODES = ("nnodes", "node_rank", "headless", "master_addr", "master_port", "distributed_timeout_seconds")
_DECIDED_BY_RAY: Mapping[str, str] = {
    **dict.fromkeys(("host", "port", "uds"), _LISTENER),
    **dict.fromkeys(TlsOptions.model_fields, "Ray's proxies do not speak TLS; a proxy in front of them has to"),
    **dict.fromkeys(ConnectionOptions.model_fields, _LISTENER),
    **dict.fromkeys(_REPLICAS, "num_replicas or autoscaling_config of the deployment say how many there are"),
    **dict.fromkeys(_NODES, "the ranks of a replica are on one machine"),
    "api_server_count": "num_replicas of the deployment says how many there are",
    "root_path": "set route_prefix of the application instead",
    "config": "write its settings into args",
}
_ALLOWED = frozenset({"limit_concurrency"})  # becomes max_ongoing_requests
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 nothing listens there; it says that the proxies may be reached from elsewhere


def read_arguments(arguments: Mapping[str, Any]) -> Serve:
    """Return the settings that the `args` of a Serve config mean; QUIRE_* variables count as for `quire serve`.

    Raises:
        ConfigError: an argument does not exist, is not valid, or is decided by Ray.
    """
    words = list(_command_line(arguments))
    _check_names(words)
    settings = Serve.parse(words)
    for field in sorted(settings.model_fields_set):
        reason = _DECIDED_BY_RAY.get(field)
        if reason is not None and field not in _ALLOWED and field != "host":
            raise ConfigError(f"quire.ray: {field} cannot be set under Ray: {reason}")
    return settings


def _check_names(words: Sequence[str]) -> None:
    """Refuse what is no setting; argparse would print its help, and end the process."""
    flags = {Serve.flag(field) for field in Serve.model_fields}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    translated, _ = Serve.translate(words)
    for word in translated:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in flags:
            field = name[2:].replace("-", "_")
            raise ConfigError(f"quire.ray: there is no setting {field!r}; args has the settings of `quire serve`")


def _command_line(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments as `quire serve` has them on its command line."""
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"quire.ray: args must be a mapping of settings, not {type(arguments).__name__}")
    for name, value in arguments.items():
        field = name.replace("-", "_")
        if field == "host":
            raise ConfigError(f"quire.ray: host cannot be set under Ray: {_LISTENER}")
        if field == "model":
            continue
        flag = field.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}={item}" for item in value)
        elif value is not None:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"
    # It decides what is open without a key: as if anybody could reach it.
    yield f"--host={_ANY_ADDRESS}"
    models = arguments.get("model") or []
    yield from [models] if isinstance(models, str) else models

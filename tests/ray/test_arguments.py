from __future__ import annotations

from typing import Any

import pytest

from quire.config.command import ConfigError
from quire.ray.arguments import read_arguments


def test_arguments_are_the_settings_of_quire_serve() -> None:
    settings = read_arguments(
        {
            "model": "quire-nano",
            "max_num_seqs": 8,
            "enable-prefix-caching": False,
            "served_model_name": ["a", "b"],
            "hf_overrides": {"x": 1},
            "seed": None,
        }
    )

    assert settings.model == ("quire-nano",)
    assert settings.max_num_seqs == 8
    assert not settings.enable_prefix_caching
    assert settings.served_model_name == ("a", "b")
    assert settings.hf_overrides == {"x": 1}


def test_several_models_are_a_list() -> None:
    assert read_arguments({"model": ["quire-nano", "quire-nano-hear"]}).model == ("quire-nano", "quire-nano-hear")


def test_variables_count_as_for_quire_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "5")

    assert read_arguments({}).max_num_seqs == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"port": 80}, "port cannot be set under Ray: Ray's proxies listen"),
        ({"host": "::1"}, "host cannot be set under Ray"),
        ({"ssl_certfile": "x"}, "ssl_certfile cannot be set under Ray: Ray's proxies do not speak TLS"),
        ({"root_path": "/x"}, "set route_prefix"),
        ({"data_parallel_size": 2}, "num_replicas or autoscaling_config"),
        ({"nnodes": 2}, "the ranks of a replica are on one machine"),
        ({"header_timeout": 5}, "header_timeout cannot be set under Ray"),
        ({"max_num_seqs": 0}, "--max-num-seqs expects"),
    ],
)
def test_what_ray_decides_and_what_is_not_valid_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_arguments(arguments)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no setting 'num_replicas'"):
        read_arguments({"num_replicas": 2})


def test_nothing_is_open_because_the_server_seems_local() -> None:
    """Proxies may be reached from other machines: administrators need a key."""
    assert read_arguments({}).host == "0.0.0.0"  # noqa: S104

"""Variables that are no settings of Quire: links to services, typing errors, and those of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.app import serve
from quire.app.cli import main
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.other_servers.variables import VARIABLES

# Of two Services, as a pod sees them.
LINKS = {
    "QUIRE_SERVICE_HOST": "10.96.0.12",
    "QUIRE_SERVICE_PORT": "8000",
    "QUIRE_SERVICE_PORT_HTTP": "8000",
    "QUIRE_PORT": "tcp://10.96.0.12:8000",
    "QUIRE_PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "QUIRE_PORT_8000_TCP_PROTO": "tcp",
    "QUIRE_PORT_8000_TCP_PORT": "8000",
    "QUIRE_PORT_8000_TCP_ADDR": "10.96.0.12",
    "QUIRE_CHAT_2_SERVICE_HOST": "fd00:10:96::1",
    "QUIRE_CHAT_2_SERVICE_PORT": "443",
    "QUIRE_CHAT_2_SERVICE_PORT_METRICS_UDP": "9090",
    "QUIRE_CHAT_2_PORT": "udp://[fd00:10:96::1]:443",
    "QUIRE_CHAT_2_PORT_443_UDP": "udp://[fd00:10:96::1]:443",
    "QUIRE_CHAT_2_PORT_443_UDP_PROTO": "udp",
    "QUIRE_CHAT_2_PORT_443_UDP_PORT": "443",
    "QUIRE_CHAT_2_PORT_443_UDP_ADDR": "fd00:10:96::1",
    "VLLM_SERVICE_HOST": "10.96.0.13",
    "VLLM_PORT": "tcp://10.96.0.13:8000",
}


def started(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """The settings with which the command would serve."""
    reached: list[Serve] = []

    def run(settings: Serve, *_: object) -> int:
        reached.append(settings)
        return 0

    monkeypatch.setattr(serve, "run", run)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 0, ended.value.code
    return reached[0]


def test_links_to_services_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    settings = started([], monkeypatch)
    assert settings.port == 8000
    assert settings.warnings == ()
    (note,) = settings.notes
    assert "passed over 16 variables that Kubernetes made" in note
    assert started(["--port", "81"], monkeypatch).port == 81


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("QUIRE_PROT", "1", "QUIRE_PORT"),
        ("QUIRE_API_KYE", "secret", "QUIRE_API_KEY"),
        ("QUIRE_SERVICE_HOST", "a b", None),
        ("QUIRE_PORT_8000_TCP", "8000", None),
        ("QUIRE_XYZZY", "1", None),
    ],
)
def test_a_variable_of_no_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, nearest: str | None
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert str(ended.value.code).startswith(f"quire: unknown environment variable {name}")
    assert nearest is None or f"did you mean {nearest}?" in str(ended.value.code)
    assert value not in ("secret",) or value not in str(ended.value.code)


def test_a_port_that_is_no_link_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PORT", "tcp:8000")
    with pytest.raises(ConfigError, match="--port expects an integer"):
        Serve.parse([])


def test_the_key_of_vllm_is_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "one,key")
    settings = Serve.parse([])
    assert settings.api_key == ("one,key",)
    assert settings.notes == ("the variable VLLM_API_KEY of vLLM is taken as --api-key",)
    for other in (["--api-key", "mine"], ["--config", str(tmp_path / "file.toml")]):
        (tmp_path / "file.toml").write_text('[serve]\napi_key = ["mine"]\n')
        settings = Serve.parse(other)
        assert settings.api_key == ("mine",)
        assert settings.warnings == ("the variable VLLM_API_KEY of vLLM has no effect: --api-key is set",)
    monkeypatch.setenv("QUIRE_API_KEY", "mine")
    assert Serve.parse([]).api_key == ("mine",)
    monkeypatch.delenv("QUIRE_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY becomes --api-key, which expects non-empty strings$"):
        Serve.parse([])


def test_variables_of_vllm_are_obeyed_or_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "VLLM_CPU_KVCACHE_SPACE": "4"}
    texts |= {"VLLM_USE_MODELSCOPE": "True", "VLLM_HOST_IP": "10.0.0.5"}
    options: dict[str, object] = {
        "log_level": "debug",
        "model_hub": "modelscope",
        "node_addr": "10.0.0.5",
        "attention_backend": "flash_attn",
        "kv_cache_memory_bytes": 4 << 30,
    }
    for name, variable in VARIABLES.items():
        if name != "VLLM_API_KEY":
            monkeypatch.setenv(name, texts.get(name, "7"))
            options.setdefault(variable.field, 7)
    options["max_audio_size"] = 7 << 20
    monkeypatch.setenv("VLLM_MAX_AUDIO_DECODE_BYTES", str(7 << 20))
    options["max_audio_decoded_size"] = 7 << 20
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    settings = Serve.parse([])
    assert {field: getattr(settings, field) for field in options} == options
    assert len(settings.notes) == len(VARIABLES) - 1
    assert settings.warnings == (
        "variables of vLLM that have no effect: VLLM_ALLOW_RUNTIME_LORA_UPDATING, VLLM_SERVER_DEV_MODE",
    )


def test_a_value_of_a_variable_of_vllm_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "soon")
    with pytest.raises(ConfigError, match=r"VLLM_HTTP_TIMEOUT_KEEP_ALIVE becomes --timeout-keep-alive.*, not 'soon'"):
        Serve.parse([])
    Serve.parse(["--timeout-keep-alive", "5"])

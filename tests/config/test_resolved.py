"""`quire config` says what each setting is and where it comes from, and writes a file that sets the same."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quire.config.command import ConfigError
from quire.config.commands import Config, Serve
from quire.config.resolved import ResolvedSetting, as_json, as_text, as_toml, resolved_settings
from quire.config.secrets import HIDDEN, shown_variable, without_passwords

FLAGS = (
    *("tiny", "--max-num-seqs", "32", "--hf-overrides", '{"a": {"b": "x\u2028"}}', "--max-body-size", "4MiB"),
    *("--api-key", "k,1", "--disable-uvicorn-access-log", "--allowed-origins", "http://a.example"),
)


def resolved(environment: dict[str, str], *arguments: str) -> dict[str, ResolvedSetting]:
    return {setting.name: setting for setting in resolved_settings(Config.parse(arguments), environment)}


def test_each_setting_has_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('[serve]\nport = 9\nhost = "::1"\nmax-n = 3\n')
    environment = {
        "QUIRE_PORT": "10",
        "QUIRE_MAX_PROMPTS": "7",
        "VLLM_MAX_STOP_STRINGS": "5",
        "VLLM_MAX_N_SEQUENCES": "4",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = resolved(environment, "tiny", "--config", str(file), "--max-prompts", "8", "-tp", "2")
    sources = {name: (setting.value, setting.source) for name, setting in settings.items()}
    assert sources["model"] == (["tiny"], "flag")
    assert sources["tensor-parallel-size"] == (2, "flag")
    assert sources["max-prompts"] == (8, "flag")
    assert sources["port"] == (10, "variable QUIRE_PORT")
    assert sources["host"] == ("::1", f"file {file}")
    assert sources["max-n"] == (3, f"file {file}")
    assert sources["max-stop"] == (5, "variable VLLM_MAX_STOP_STRINGS")
    assert sources["max-body-size"] == ("32MiB", "default")
    assert settings.keys() == {Serve.flag(name).removeprefix("--").lower() for name in Serve.model_fields}


def test_the_written_file_sets_the_same(tmp_path: Path) -> None:
    lines = list(as_toml(list(resolved({}, *FLAGS).values())))
    file = tmp_path / "quire.toml"
    file.write_text("\n".join(lines))
    again, first = Serve.parse(["--config", str(file)]), Serve.parse(FLAGS)
    hidden = {"api_key", "config"}
    assert again.model_dump(exclude=hidden) == first.model_dump(exclude=hidden)
    assert tomllib.loads(file.read_text())["serve"]["access-log"] is False


def test_secrets_are_hidden_in_all_formats() -> None:
    settings = list(
        resolved(
            {},
            *("--api-key", "s3cret", "--response-store", "postgresql://me:s3cret@host/db", "--ssl-keyfile-password"),
            *("s3cret", "--tool-server", "tools=http://me:s3cret@127.0.0.1/mcp"),
        ).values()
    )
    for text in (json.dumps(as_json(settings)), "\n".join(as_toml(settings)), "\n".join(as_text(settings))):
        assert "s3cret" not in text
        assert f"postgresql://{HIDDEN}@host/db" in text
        assert "api-key" in text


def test_what_is_not_the_default_comes_first() -> None:
    lines = list(as_text(list(resolved({}, "--port", "9").values())))
    assert lines[0].split() == ["port", "9", "flag"]
    assert all(line.endswith("default") for line in lines[1:])


def test_errors_are_those_of_the_server() -> None:
    with pytest.raises(ConfigError, match="--port expects an integer from 0 to 65535"):
        Config.parse(["--port", "x"])


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abc", HIDDEN),
        ("QUIRE_API_KEY", "abc", HIDDEN),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=abc", HIDDEN),
        ("QUIRE_SSL_KEYFILE_PASSWORD", "abc", HIDDEN),
        ("HTTPS_PROXY", "http://me:abc@proxy:1", f"http://{HIDDEN}@proxy:1"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("HF_TOKEN", "", ""),
    ],
)
def test_variables_with_secrets_are_hidden(name: str, value: str, shown: str) -> None:
    assert shown_variable(name, value) == shown


def test_urls_without_passwords_stay() -> None:
    texts: list[Any] = ["http://host:80/a@b", "mail@host", "sqlite:///file.db"]
    assert [without_passwords(text) for text in texts] == texts

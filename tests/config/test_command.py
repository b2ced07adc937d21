"""Settings come from flags, variables, file and defaults, and wrong ones are refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.command import ConfigError
from quire.config.commands import COMMANDS, BenchServe, Embed, Listen, Serve


def test_defaults() -> None:
    settings = Serve.parse([])
    assert settings.model == ()
    assert (settings.host, settings.port, settings.dtype) == ("127.0.0.1", 8000, "auto")


def test_flags() -> None:
    settings = Serve.parse(
        [
            *("one", "two", "--port", "9", "--api-key", "a", "--api-key", "b", "--kv-cache-memory-bytes", "4GiB"),
            *("--no-enable-prefix-caching", "--engine-process", "--default-chat-template-kwargs", '{"x": [1]}'),
        ]
    )
    assert settings.model == ("one", "two")
    assert settings.api_key == ("a", "b")
    assert settings.kv_cache_memory_bytes == 4 << 30
    assert not settings.enable_prefix_caching
    assert settings.engine_process
    assert settings.default_chat_template_kwargs == {"x": [1]}


def test_commas_stay_in_flags_and_part_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Serve.parse(["a,b", "c", "--api-key", "k,1", "--served-model-name", "x=a,b", "--allowed-origins", "p,q"])
    assert settings.model == ("a,b", "c")
    assert settings.api_key == ("k,1",)
    assert settings.served_model_name == ("x=a,b",)
    assert settings.allowed_origins == ("p", "q")
    monkeypatch.setenv("QUIRE_MODEL", "a,b")
    assert Serve.parse([]).model == ("a", "b")


def test_an_empty_key_does_not_open_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quire.toml"
    path.write_text('[serve]\napi-key = [""]\n')
    for arguments in (["--api-key", ""], ["--api-key", "k", "--api-key", " "], ["--config", str(path)]):
        with pytest.raises(ConfigError, match="--api-key expects non-empty strings"):
            Serve.parse(arguments)
    monkeypatch.setenv("QUIRE_API_KEY", "")
    with pytest.raises(ConfigError, match="--api-key expects non-empty strings"):
        Serve.parse([])


def test_flags_go_before_variables_before_the_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(
        '[serve]\nport = 1\nmax-n = 1\nseed = 1\nmodel = ["m"]\nallowed_origins = ["a", "b"]\n'
        "[bench.serve]\nworkload-seed = 7\n"
    )
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_MAX_N", "2")
    monkeypatch.setenv("QUIRE_API_KEY", "k1,k2")
    settings = Serve.parse(["--config", str(path), "--port", "3"])
    assert (settings.port, settings.max_n, settings.seed, settings.max_stop) == (3, 2, 1, 16)
    assert settings.model == ("m",)
    assert settings.api_key == ("k1", "k2")
    assert settings.allowed_origins == ("a", "b")
    monkeypatch.setenv("QUIRE_CONFIG", str(path))
    assert Serve.parse([]).seed == 1
    assert BenchServe.parse([]).workload_seed == 7


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "99999"], "--port expects an integer from 0 to 65535, not '99999'"),
        (["--port", "x"], "--port expects an integer from 0 to 65535, not 'x'"),
        (["--dtype", "f8"], "--dtype expects auto, float32, bfloat16 or float16, not 'f8'"),
        (
            ["--kv-cache-free-memory-fraction", "2"],
            "--kv-cache-free-memory-fraction expects a number above 0, at most 1, not '2'",
        ),
        (
            ["--kv-cache-memory-bytes", "3XB"],
            "--kv-cache-memory-bytes expects a size in bytes such as 512MiB or 4GiB, not '3XB'",
        ),
        (
            ["--response-store-size", "10"],
            "--response-store-size expects a size in bytes of at least 1MiB, such as 512MiB or 4GiB, not '10'",
        ),
        (
            ["--max-audio-size", "10"],
            "--max-audio-size expects a size in bytes of at least 1KiB, such as 512KiB or 25MiB, not '10'",
        ),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs expects a JSON object, not [1]"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs expects a JSON object, not '{'"),
        (["--max-num-seqs", "0"], "--max-num-seqs expects an integer from 1 to 65536, not '0'"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout expects a number above 0, at most 1000000000, not 'inf'"),
    ],
)
def test_a_bad_value_is_refused_with_the_flags_name_and_what_it_expects(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Serve.parse(arguments)
    assert str(refused.value) == f"quire serve: {complaint}"


def test_bad_variables_and_files_are_refused_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quire.toml"
    for text, complaint in (
        ("[serve]\nport = 'x'", "--port expects"),
        ("port = 1", "'port' must be inside a command's table.*quire.toml"),
        ("[serv]\nport = 1", r"\[serv\] does not belong to a command; .*\[bench.serve\].*quire.toml"),
        ("[bench.sreve]\nseed = 1", r"\[bench.sreve\] does not belong to a command"),
        ("[bench]\nconcurrency = 5", "'bench.concurrency' must be inside a command's table"),
        ("[bench]\nserve = 5", "'bench.serve' expects a table"),
        ("[[serve]]\nport = 5", "'serve' expects a table"),
        ("[serve]\nprot = 1", "unknown setting 'prot'"),
        ("port = ", "--config expects a readable TOML file"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            Serve.parse(["--config", str(path)])
    with pytest.raises(ConfigError, match="--config expects a readable TOML file"):
        Serve.parse(["--config", str(tmp_path / "missing.toml")])
    monkeypatch.setenv("QUIRE_PORT", "x")
    with pytest.raises(ConfigError, match="--port expects"):
        Serve.parse([])


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        BenchServe.parse(["--concurrency", "0", "--abort-fraction", "3"])
    assert str(refused.value).count("expects") == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prot", "1"], "unknown argument '--prot'; did you mean --port?"),
        (["--max-modle-len=16"], "unknown argument '--max-modle-len'; did you mean --max-model-len?"),
        (["--zzzz"], "unknown argument '--zzzz'."),
        (["--port"], "argument --port: expected one argument."),
    ],
)
def test_unknown_flags_end_with_a_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        Serve.parse(arguments)
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert shown == f"quire serve: {complaint} `quire serve --help` lists all flags.\n"


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as left:
            command.parse(["--help"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        for field in command.model_fields:
            assert command.flag(field) in shown


def test_help_works_without_docstrings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `python -OO`."""
    monkeypatch.setattr(Serve, "__doc__", None)
    assert Serve.summary() == ""
    with pytest.raises(SystemExit):
        Serve.parse(["--help"])
    assert "None" not in capsys.readouterr().out.split("options:")[0]


def test_variables_are_shared_only_by_settings_that_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DEVICE", "reference")
    monkeypatch.setenv("QUIRE_SEED", "7")
    monkeypatch.setenv("QUIRE_MODEL", "a,b")
    monkeypatch.setenv("QUIRE_API_KEY", "key")
    serve, listen, bench, embed = Serve.parse([]), Listen.parse([]), BenchServe.parse([]), Embed.parse(["texts.txt"])
    assert (serve.device, serve.seed, serve.model) == ("reference", 7, ("a", "b"))
    assert (listen.input_device, bench.workload_seed, embed.model_name) == (None, 0, None)
    assert serve.api_key == (listen.api_key,) == (bench.api_key,) == (embed.api_key,)


def test_every_setting_says_what_it_is_for() -> None:
    for command in COMMANDS:
        for field in command.model_fields.values():
            assert field.description

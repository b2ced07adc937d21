"""The `quire` command itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import __version__
from quire.app.cli import main
from quire.app.models import resolve_models
from quire.config.command import ConfigError


def status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"quire {__version__}\n"
    for arguments in ((), ("--help",), ("bench",)):
        assert status(*arguments) == 0
        shown = capsys.readouterr().out
        for name in ("quire serve", "quire chat", "quire bench serve", "quire bench startup"):
            assert name in shown


def test_unknown_commands_and_settings_end_with_words() -> None:
    assert "no command 'sreve'" in str(status("sreve"))
    assert "--port takes" in str(status("serve", "--port", "x"))
    assert "--ssl-keyfile" in str(status("serve", "--ssl-certfile", "x"))
    assert "--max-num-batched-tokens" in str(status("serve", "--max-num-batched-tokens", "4"))


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PROT", "1")
    assert "QUIRE_PROT" in str(status("chat", "--message", "x"))


def test_models_that_cannot_be_found_are_named() -> None:
    assert "'no/such-model'" in str(status("serve", "no/such-model"))


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "sub/c"):
        (tmp_path / name).mkdir(parents=True)

    def names(given: list[str], served: list[str]) -> list[tuple[str, ...]]:
        return [source.names for source in resolve_models(given, served, None)]

    assert names([], []) == [("quire-nano",)]
    assert names(["a"], []) == [("a",)]
    assert names(["sub/c"], []) == [("c", "sub/c")]
    assert names(["a"], ["x", "y"]) == [("x", "y")]
    assert names(["a", "b"], ["x=a", "y=a"]) == [("x", "y"), ("b",)]
    for given, served, complaint in (
        (["a", "b"], ["x"], "NAME=MODEL"),
        (["a"], ["x=z"], "names no model"),
        (["a", "b"], ["x=a", "x=b"], "two models"),
        (["a", "b"], ["b=a"], "two models"),
        (["a", "a"], [], "twice"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            names(given, served)

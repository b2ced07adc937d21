"""The `quire` command itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire import __version__
from quire.app.cli import main
from quire.app.models import Lookup, resolve_models
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


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("3", "3")])
def test_numpy_has_no_threads_that_spin(monkeypatch: pytest.MonkeyPatch, before: str | None, after: str) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {"OPENBLAS_NUM_THREADS": before})
    main(["--version"])
    assert os.environ["OPENBLAS_NUM_THREADS"] == after


def test_unknown_commands_end_with_the_overview_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words, complaint in (
        (("sreve",), "'sreve'; did you mean `quire serve`?"),
        (("zzz",), "'zzz'"),
        (("bench", "foo", "--seed", "1"), "'bench foo'"),
    ):
        assert status(*words) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "quire bench serve" in shown.err
        assert shown.err.endswith(f"quire: there is no command {complaint}\n")


def test_wrong_settings_end_with_words() -> None:
    assert "--port expects" in str(status("serve", "--port", "x"))
    assert "--ssl-keyfile" in str(status("serve", "--ssl-certfile", "x"))
    assert "--max-num-batched-tokens" in str(status("serve", "--max-num-batched-tokens", "4"))


def test_files_that_will_not_do_are_refused_before_the_work(tmp_path: Path) -> None:
    binary, missing = tmp_path / "binary", tmp_path / "missing" / "file"
    binary.write_bytes(b"\xff")
    for arguments, complaint in (
        (("serve", "--chat-template", missing), f"readable file or the text of a template, not '{missing}'"),
        (("serve", "--chat-template", binary), "--chat-template expects a readable file or the text"),
        (("serve", "--ssl-certfile", missing, "--ssl-keyfile", binary), "--ssl-certfile expects a readable file"),
        (("serve", "--ssl-certfile", binary, "--ssl-keyfile", missing), "--ssl-keyfile expects a readable file"),
        (("serve", "--ssl-certfile", binary, "--ssl-keyfile", binary), "are not a valid certificate and key"),
        (("bench", "serve", "--result", missing), f"--result expects a writable file, not '{missing}'"),
        (("bench", "serve", "--result", tmp_path), "it is a directory"),
        (("bench", "serve", "--plot", tmp_path / "out.xyz"), "plots are written as"),
        (("bench", "startup", "--result", missing), f"--result expects a writable file, not '{missing}'"),
        (("bench", "startup", "--serve-args", "'"), "--serve-args is not a valid shell command line"),
    ):
        said = str(status(*map(str, arguments)))
        assert said.startswith(f"quire {arguments[0]}")
        assert complaint in said
        assert "\n" not in said


def test_a_server_that_cannot_be_asked_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("chat", "--message", "x"), ("bench", "serve")):
        assert status(*command, "--url", "http://[::") == 1
        assert "invalid server URL http://[::" in capsys.readouterr().err


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PROT", "1")
    assert "QUIRE_PROT" in str(status("chat", "--message", "x"))


def test_models_that_cannot_be_found_are_named() -> None:
    assert "'no/such-model'" in str(status("serve", "no/such-model", "--port", "0"))


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "sub/c"):
        (tmp_path / name).mkdir(parents=True)

    def names(models: list[str], served: list[str]) -> list[tuple[str, ...]]:
        return [source.names for source in resolve_models(models, served, Lookup())]

    assert names([], []) == [("quire-nano",), ("quire-nano-embed",), ("quire-nano-hear",), ("quire-nano-see",)]
    assert names([], ["x", "y=quire-nano-embed"]) == [("x",), ("y",), ("quire-nano-hear",), ("quire-nano-see",)]
    assert names(["a"], []) == [("a",)]
    assert names(["sub/c"], []) == [("c", "sub/c")]
    assert names(["a"], ["x", "y"]) == [("x", "y")]
    assert names(["a", "b"], ["x=a", "y=a"]) == [("x", "y"), ("b",)]
    for models, served, complaint in (
        (["a", "b"], ["x"], "NAME=MODEL"),
        (["a"], ["x=z"], "does not match any MODEL"),
        (["a", "b"], ["x=a", "x=b"], "two models"),
        (["a", "b"], ["b=a"], "two models"),
        (["a", "a"], [], "twice"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            names(models, served)

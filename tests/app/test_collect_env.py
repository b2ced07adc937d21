"""`quire collect-env` and `quire config`, as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.app.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_a_report_has_what_matters_and_nothing_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.setenv("QUIRE_PORT", "9")
    monkeypatch.setenv("HOME_ADDRESS", "private")
    monkeypatch.setenv("HTTP_PROXY", "http://user:pr0xy@proxy:3128")
    monkeypatch.setenv("https_proxy", "user:pr0xy@proxy:3128")
    text = printed(capsys, "collect-env")
    report = json.loads(printed(capsys, "collect-env", "--format", "json"))
    assert report["Quire"]["version"] == __version__
    assert report["Python"]["version"] == sys.version
    assert report["CPU"]["threads"] >= 1
    assert report["memory"]["total"].endswith(" GiB")
    assert report["packages"]["torch"]
    assert report["variables"]["QUIRE_PORT"] == "9"
    assert report["variables"]["HF_TOKEN"] == "(hidden)"
    assert report["variables"]["HTTP_PROXY"] == "http://(hidden)@proxy:3128"
    assert report["variables"]["https_proxy"] == "(hidden)@proxy:3128"
    for section in report:
        assert f"{section}:" in text
    for secret in ("hf_s3cret", "private", "pr0xy"):
        assert secret not in text + json.dumps(report)


def test_settings_are_shown_without_loading_anything(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capsys, "config", "--format", "json", "--max-num-seqs", "8", "--swap-space", "4"))
    assert shown["settings"]["max-num-seqs"] == {"value": 8, "source": "flag"}
    assert shown["models"] == {}
    assert "--swap-space 4 has no effect" in shown["notes"][0]


def test_neither_imports_torch() -> None:
    script = (
        "import sys\nfrom quire.app.cli import main\n"
        "for arguments in (['collect-env'], ['config', '--port', '9']):\n"
        "    try:\n        main(arguments)\n    except SystemExit as left:\n        assert not left.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_model_is_described_without_its_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    arguments = ("config", "quire-nano", str(tmp_path), "no/such-model", "--format", "json", "--dtype", "float32")
    models = json.loads(printed(capsys, *arguments))["models"]
    assert models["quire-nano"]["dtype"] == "float32"
    assert models["quire-nano"]["implementation"] == "quire"
    assert int(models["quire-nano"]["max_model_len"].partition(",")[0]) > 0
    assert "config.json cannot be read" in models[str(tmp_path)]["problem"]
    assert "not on this machine" in models["no/such-model"]["problem"]

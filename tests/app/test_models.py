"""Models whose weights are in formats that are not loaded are refused by name, before their other files are read."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest

from quire.app.models import find_folder, resolve_models
from quire.config.command import ConfigError
from tests.support.gguf_models import write_gguf
from tests.support.models import make_model, save_model

CASES = [
    (("config.json", "pytorch_model.bin"), "pytorch_model.bin is in PyTorch's pickle format"),
    (("config.json", "tokenizer.json", "adapter_model.safetensors"), "adapter_model.safetensors is an adapter"),
]


@pytest.mark.parametrize(("names", "complaint"), CASES)
def test_a_directory_without_weights_that_can_be_loaded(names: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"no .safetensors files that can be loaded: {complaint}"):
        find_folder(str(tmp_path), None)


@pytest.mark.parametrize(
    ("names", "complaint"), [*CASES, (("tiny-Q4_K_M.gguf",), "tiny-Q4_K_M.gguf is in the GGUF format")]
)
def test_a_repository_without_weights_that_can_be_loaded(
    names: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not downloaded, so that only the repository has their names."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: list(names))
    with pytest.raises(ConfigError, match=f"'some/model' contains no .*: {complaint}"):
        find_folder("some/model", None)


@pytest.mark.parametrize(
    "names",
    [("model.safetensors", "model.gguf"), ("modules.json", "pytorch_model.bin"), ("config.json",), ()],
)
def test_other_directories_are_loaded(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or refused while they are. Without a network, nothing is known about what a repository has."""

    def fails(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no network")

    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fails)
    assert find_folder(str(tmp_path), None) == find_folder("some/model", None) == tmp_path


def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A file, and a folder with one, become the same folder; its name is the file's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "models" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    write_gguf(save_model(make_model("llama"), tmp_path / "twin"), path)
    with caplog.at_level("INFO"):
        folder = find_folder(str(path.parent), None)
    assert folder == find_folder(str(path), None)
    assert "the model is tiny-Q8_0.gguf, the only GGUF file" in caplog.text
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", path.name} <= {f.name for f in folder.iterdir()}
    assert resolve_models([str(path)], [], None)[0].names == ("tiny-Q8_0", str(path))


def test_gguf_files_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a\.gguf: its header: .* the file ends at byte 4"):
        find_folder(str(tmp_path), None)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"has several models; name the file of one: a\.gguf, b\.gguf"):
        find_folder(str(tmp_path), None)
    (tmp_path / "c.bin").touch()
    with pytest.raises(ConfigError, match=r"is a file; expected a \.gguf file, or a directory"):
        find_folder(str(tmp_path / "c.bin"), None)

"""Models whose weights are in formats that are not loaded are refused by name, before their other files are read."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest

from quire.app.models import find_folder
from quire.config.command import ConfigError

CASES = [
    (("tiny-Q4_K_M.gguf",), "tiny-Q4_K_M.gguf is in the GGUF format"),
    (("config.json", "pytorch_model.bin"), "pytorch_model.bin is in PyTorch's pickle format"),
    (("config.json", "tokenizer.json", "adapter_model.safetensors"), "adapter_model.safetensors is an adapter"),
]


@pytest.mark.parametrize(("names", "complaint"), CASES)
def test_a_directory_without_weights_that_can_be_loaded(names: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"no .safetensors files that can be loaded: {complaint}"):
        find_folder(str(tmp_path), None)


@pytest.mark.parametrize(("names", "complaint"), CASES)
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

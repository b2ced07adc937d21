"""Models whose weights are in formats that are not loaded are refused by name, before their other files are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.app.models import Lookup, find_folder, resolve_models
from quire.config.command import ConfigError
from tests.support.gguf_models import write_gguf
from tests.support.models import make_model, save_model

ANY = Lookup()
CASES = [
    (("config.json", "pytorch_model.bin"), "pytorch_model.bin is in PyTorch's pickle format"),
    (("config.json", "tokenizer.json", "adapter_model.safetensors"), "adapter_model.safetensors is an adapter"),
]


@pytest.mark.parametrize(("names", "complaint"), CASES)
def test_a_directory_without_weights_that_can_be_loaded(names: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"no .safetensors files that can be loaded: {complaint}"):
        find_folder(str(tmp_path), ANY)


@pytest.mark.parametrize(
    "names",
    [("model.safetensors", "model.gguf"), ("modules.json", "pytorch_model.bin"), ("config.json",), ()],
)
def test_other_directories_are_loaded(names: tuple[str, ...], tmp_path: Path) -> None:
    """Or refused while they are."""
    for name in names:
        (tmp_path / name).touch()
    assert find_folder(str(tmp_path), ANY) == tmp_path


def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A file, and a folder with one, become the same folder; its name is the file's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "models" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    write_gguf(save_model(make_model("llama"), tmp_path / "twin"), path)
    with caplog.at_level("INFO"):
        folder = find_folder(str(path.parent), ANY)
    assert folder == find_folder(str(path), ANY)
    assert "the model is tiny-Q8_0.gguf, the only GGUF file" in caplog.text
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", path.name} <= {f.name for f in folder.iterdir()}
    assert resolve_models([str(path)], [], ANY)[0].names == ("tiny-Q8_0", str(path))


def test_gguf_files_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a\.gguf: its header: .* the file ends at byte 4"):
        find_folder(str(tmp_path), ANY)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"has several models; name the file of one: a\.gguf, b\.gguf"):
        find_folder(str(tmp_path), ANY)
    (tmp_path / "c.bin").touch()
    with pytest.raises(ConfigError, match=r"is a file; expected a \.gguf file, or a directory"):
        find_folder(str(tmp_path / "c.bin"), ANY)


def test_a_folder_with_several_quantizations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = tmp_path / "models"
    models.mkdir()
    write_gguf(save_model(make_model("llama"), tmp_path / "twin"), models / "tiny-Q8_0.gguf")
    (models / "Q4_K_M").mkdir()
    for name in ("tiny-BF16.gguf", "Q4_K_M/tiny-Q4_K_M.gguf"):
        (models / name).write_bytes((models / "tiny-Q8_0.gguf").read_bytes())
    with caplog.at_level("INFO"):
        assert find_folder(str(models), ANY).name == "tiny-Q4_K_M"
    assert "as Q4_K_M is taken where no quantization is named, of Q4_K_M, BF16, Q8_0" in caplog.text
    source = resolve_models([f"{models}:Q8_0"], [], ANY)[0]
    assert source.folder.name == "tiny-Q8_0"
    assert source.names == ("models:Q8_0", f"{models}:Q8_0")
    (tmp_path / "mmproj-F16.gguf").touch()
    (models / "model.safetensors").touch()
    assert find_folder(str(models), ANY) == models
    assert find_folder(str(models), Lookup(load_format="gguf")).name == "tiny-Q4_K_M"
    for model, load_format, complaint in (
        (f"{models}:Q2_K", "auto", "has no GGUF file 'Q2_K'; it has Q4_K_M, BF16, Q8_0"),
        (str(models / "tiny-Q8_0.gguf"), "safetensors", "is a GGUF file, but --load-format is safetensors"),
        (str(tmp_path / "mmproj-F16.gguf"), "auto", "part of a model that reads pictures"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            find_folder(model, Lookup(load_format=load_format))  # type: ignore[arg-type]

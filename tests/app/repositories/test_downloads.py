"""Models of repositories: which files are downloaded, from a hub on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from quire.app.models import Lookup, NotHere, find_folder, resolve_models
from quire.app.repositories.needed_files import gguf_files
from quire.config.command import ConfigError
from tests.support.gguf_models import write_gguf
from tests.support.hub import Hub, running_hub, use_hub
from tests.support.models import make_model, save_model

_ANY = Lookup()
_UNNEEDED = [
    *(
        "README.md",
        "model.bin",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "tf_model.h5",
        "flax_model.msgpack",
    ),
    *("original/consolidated.00.pth", "original/params.json", "onnx/model.onnx", "onnx/config.json", "openvino/a.json"),
    *("original/model.safetensors", "consolidated.safetensors", "model.fp32.safetensors", "metal/model.bin"),
]
_SMALL = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "vocab.txt"]


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub without repositories, and with an empty cache."""
    use_hub(running, tmp_path / "hub", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    running.repositories.clear()
    running.tokens.clear()
    running.sent.clear()
    running.cut_after = None
    return running


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "tiny.gguf"
    write_gguf(save_model(make_model("llama"), folder / "twin"), path)
    return path.read_bytes()


def some_files(*names: str) -> dict[str, bytes | str]:
    return {name: f"{{{name!r}: 1}}".replace("'", '"') for name in names}


def test_only_needed_files_are_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("some/model", some_files("model.safetensors", *_SMALL, *_UNNEEDED))
    with caplog.at_level("INFO"):
        folder = find_folder("some/model", _ANY)
    assert hub.names_sent == {"model.safetensors", *_SMALL}
    assert {path.name for path in folder.iterdir()} == {".gitattributes", "model.safetensors", *_SMALL}
    assert "some/model: downloading 6 of its 23 files" in caplog.text
    hub.sent.clear()
    assert find_folder("https://huggingface.co/some/model", _ANY) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_folder("some/model", _ANY) == folder
    assert not hub.sent
    with pytest.raises(NotHere, match="not on this machine"):
        find_folder("other/model", _ANY)


def test_shards_modules_and_adapters(hub: Hub) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    modules = [{"path": "", "type": "t"}, {"path": "1_Pooling", "type": "p"}, {"path": "2_Dense", "type": "d"}]
    needed = {
        **some_files(
            *shards, "config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"
        ),
        **some_files("speech-lora/adapter_config.json", "speech-lora/adapter_model.safetensors", "artifact.metadata"),
        **some_files("additional_chat_templates/tools.jinja"),
        "modules.json": json.dumps(modules),
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}),
    }
    unneeded = some_files(*_UNNEEDED, "model.safetensors", "2_Dense/pytorch_model.bin", "3_Dense/model.safetensors")
    hub.add("some/model", {**needed, **unneeded, **some_files("other/adapter_model.safetensors")})
    find_folder("some/model", _ANY)
    assert hub.names_sent == set(needed)


def test_quantizations(hub: Hub, gguf_file: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One file is downloaded, and served from the folder that is made of it."""
    files = {f"Tiny-{label}.gguf": gguf_file for label in ("Q8_0", "Q4_K_M", "BF16")}
    hub.add("some/tiny-GGUF", {**files, **some_files("config.json", "README.md")})
    with caplog.at_level("INFO"):
        source = resolve_models(["hf.co/some/tiny-GGUF:q8_0"], [], _ANY)[0]
    assert hub.names_sent == {"config.json", "Tiny-Q8_0.gguf"}  # the first is read to see what there is
    assert (source.folder / "tokenizer.json").exists()
    assert source.folder.name == "Tiny-Q8_0"
    assert source.names == ("some/tiny-GGUF:q8_0", "hf.co/some/tiny-GGUF:q8_0")
    assert "the model is Tiny-Q8_0.gguf, as q8_0 was named, of BF16, Q4_K_M, Q8_0" in caplog.text
    assert find_folder("some/tiny-GGUF", _ANY).name == "Tiny-Q4_K_M"
    assert find_folder(f"{hub.url}/some/tiny-GGUF/resolve/main/Tiny-BF16.gguf", _ANY).name == "Tiny-BF16"
    with pytest.raises(ConfigError, match="has no GGUF file 'Q2_K'; it has BF16, Q4_K_M, Q8_0"):
        find_folder("some/tiny-GGUF:Q2_K", _ANY)
    with pytest.raises(ConfigError, match=r"no \.safetensors files that can be loaded: Tiny-.*\.gguf is in the GGUF"):
        find_folder("some/tiny-GGUF", Lookup(load_format="safetensors"))


def test_a_vision_tower_beside_a_model_is_downloaded() -> None:
    names = ["Q8_0/tiny.gguf", "Q8_0/mmproj-F16.gguf", "Q8_0/mmproj-BF16.gguf", "mmproj-F32.gguf", "tokenizer.json"]
    assert gguf_files(names, "Q8_0/tiny.gguf") == ["Q8_0/tiny.gguf", "Q8_0/mmproj-BF16.gguf"]


def test_both_formats(hub: Hub, gguf_file: bytes) -> None:
    hub.add("some/both", {"Tiny-Q8_0.gguf": gguf_file, **some_files("model.safetensors", "config.json")})
    assert (find_folder("some/both", _ANY) / "model.safetensors").exists()
    assert find_folder("some/both", Lookup(load_format="gguf")).name == "Tiny-Q8_0"
    hub.add("some/plain", some_files("model.safetensors", "config.json", "tokenizer.json"))
    hub.sent.clear()
    find_folder("some/plain", Lookup(load_format="dummy"))
    assert hub.names_sent == {"config.json", "tokenizer.json"}


def test_a_model_whose_weights_are_not_read_is_downloaded_without_them(hub: Hub) -> None:
    small = some_files("config.json", "tokenizer.json", "1_Pooling/config.json", "speech-lora/adapter_config.json")
    small["modules.json"] = json.dumps([{"path": "", "type": "t"}, {"path": "1_Pooling", "type": "p"}])
    hub.add("some/large", {**small, **some_files("model.safetensors", "speech-lora/adapter_model.safetensors")})
    folder = find_folder("some/large", Lookup(with_weights=False))
    assert hub.names_sent == set(small)
    assert find_folder("some/large", Lookup(with_weights=False)) == folder
    assert (find_folder("some/large", _ANY) / "model.safetensors").exists()


def test_offline_takes_the_quantization_that_is_there(
    hub: Hub, gguf_file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("some/tiny-GGUF", {f"Tiny-{label}.gguf": gguf_file for label in ("Q8_0", "Q4_K_M")})
    folder = find_folder("some/tiny-GGUF:Q8_0", _ANY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_folder("some/tiny-GGUF", _ANY) == folder
    with pytest.raises(ConfigError, match="has no GGUF file 'Q4_K_M'; it has Q8_0"):
        find_folder("some/tiny-GGUF:Q4_K_M", _ANY)


def test_all_parts_of_a_file(hub: Hub, gguf_file: bytes) -> None:
    parts = [f"Q4_K_M/Tiny-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    hub.add("some/tiny-GGUF", {parts[0]: gguf_file, parts[1]: gguf_file + b"2", "Tiny-Q8_0.gguf": gguf_file})
    with pytest.raises(ConfigError, match="Tiny-Q4_K_M-00001-of-00002"):  # the parts are no parts of each other
        find_folder("some/tiny-GGUF:Q4_K_M", _ANY)
    assert hub.names_sent == set(parts)
    del hub.repositories["some/tiny-GGUF"][parts[1]]
    hub.repositories["some/part"] = hub.repositories["some/tiny-GGUF"]
    with pytest.raises(ConfigError, match=f"lacks files that the model needs: {parts[1]}"):
        find_folder("some/part:Q4_K_M", _ANY)


def test_a_download_goes_on_where_it_was_cut(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    weights = bytes(range(256)) * 64
    hub.add("some/model", {"config.json": "{}", "model.safetensors": weights})
    hub.cut_after = 9 << 10
    folder = find_folder("some/model", _ANY)
    assert (folder / "model.safetensors").read_bytes() == weights
    begins = [begin for name, begin in hub.sent if name == "model.safetensors"]
    assert len(begins) == 2
    assert begins[0] == 0 < begins[1]


def test_repositories_that_cannot_be_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/model", some_files("config.json", "model.safetensors"))
    for model, revision, complaint in (
        ("other/model", None, "is not a directory, and cannot be downloaded .*: there is no such repository"),
        ("some/model", "v7", "it has no revision 'v7'"),
        ("https://hf.co/some/model/tree/v1", "main", "--revision is main, but .* has the revision v1"),
        ("a/b/c", None, "is not a directory, and cannot be downloaded"),
        ("some/model:Q4_K_M", None, "there is no GGUF file with a model, of which Q4_K_M could be one"),
        ("some/model/x.gguf", None, "there is no GGUF file with a model at x.gguf"),
        ("/no/such/place", None, "is neither a file nor a directory"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            find_folder(model, Lookup(revision))
    assert find_folder("some/model", Lookup("v1")) == find_folder("https://hf.co/some/model/tree/v1", _ANY)
    hub.add("some/gated", some_files("config.json", "model.safetensors"))
    hub.tokens["some/gated"] = "secret"
    with pytest.raises(ConfigError, match="ask for it on its page, and set HF_TOKEN"):
        find_folder("some/gated", _ANY)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (find_folder("some/gated", _ANY) / "model.safetensors").exists()


def test_weights_in_other_formats_are_refused_before_they_are_downloaded(hub: Hub) -> None:
    for name, complaint in (
        ("pytorch_model.bin", "can be loaded: pytorch_model.bin is in PyTorch's pickle format"),
        ("mmproj-F16.gguf", "no GGUF file with a model: mmproj-F16.gguf is the part of a model that reads pictures"),
        ("consolidated.safetensors", "can be loaded: consolidated.safetensors is in Mistral's own format"),
    ):
        hub.add(f"some/{name}", some_files("config.json", name))
        with pytest.raises(ConfigError, match=complaint):
            find_folder(f"some/{name}", _ANY)
    assert hub.names_sent == {"config.json"}


def test_modelscope(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is asked for the needed files; without it, the error names the extra."""
    lookup = Lookup(hub="modelscope", revision="v2")
    monkeypatch.setattr("quire.app.repositories.hubs.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[modelscope\]'"):
        find_folder("some/model", lookup)
    monkeypatch.undo()
    use_hub(hub, tmp_path / "hub", monkeypatch)
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"]
    asked = []

    def snapshot_download(repository: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repository, revision, {name for name in allow_patterns if name in names}))
        for name in set(names) & set(allow_patterns):
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    files = [{"Path": name, "Size": 2, "Type": "blob"} for name in names]
    api = SimpleNamespace(get_model_files=lambda *_, **__: files)
    for name, contents in {
        "modelscope": {"__spec__": SimpleNamespace()},
        "modelscope.hub": {},
        "modelscope.hub.api": {"HubApi": lambda: api},
        "modelscope.hub.snapshot_download": {"snapshot_download": snapshot_download},
        "modelscope_hub": {},
        "modelscope_hub.errors": {"HubError": RuntimeError},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(dict(contents))  # type: ignore[call-overload]
        monkeypatch.setitem(sys.modules, name, module)
    assert find_folder("some/model", lookup) == tmp_path
    assert asked == [
        ("some/model", "v2", {"config.json"}),
        ("some/model", "v2", {"model.safetensors", "tokenizer.json"}),
    ]

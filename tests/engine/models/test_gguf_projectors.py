"""Models in GGUF files see with the file of their vision tower ("mmproj") what they see in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.engine.models.checkpoint.gguf.folder import model_folder
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy, load
from tests.support.gguf_models import add_value
from tests.support.gguf_projectors import MODEL, PROJECTOR, write_seeing
from tests.support.pictures import drawn
from tests.support.variants import slow_but
from tests.support.vision_models import COMPOSITES, make_composite, prompt_with_pictures, save_seeing

TOKENS = 7
CASES = [
    *("gemma3-narrow", "idefics3", "internvl", "llava", "llava_next", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "llava-siglip", "paddleocr_vl", "smolvlm"),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _experts_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have no room for layers without experts behind some with them."""
    kind, fields = COMPOSITES["qwen3_vl_moe"]
    text = {**fields["text_config"], "mlp_only_layers": []}
    monkeypatch.setitem(COMPOSITES, "qwen3_vl_moe", (kind, {**fields, "text_config": text}))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model in a file, and one of its vision tower."""
    target = tmp_path_factory.mktemp("seeing")
    written(target, "idefics3")
    return target


@pytest.fixture(scope="module")
def seeing_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("llava")
    written(target, "llava")
    return target


def linked(source: Path, target: Path, *names: str) -> Path:
    """Link files of a directory in another one. Returns the path of the model there."""
    for name in names:
        (target / name).symlink_to(source / name)
    return target / MODEL


def written(target: Path, case: str, metadata: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """The path of a case's file, and its twin in Hugging Face's format."""
    twin = save_seeing(make_composite(case), case, target / "twin")
    path = twin / "config.json"
    config = json.loads(path.read_text())
    if case.startswith("gemma3"):  # files have no room for another scale of scores
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
    elif case == "mistral3":  # nor for another size of pictures than the tower's
        processor = json.loads((twin / "preprocessor_config.json").read_text())
        config["vision_config"]["image_size"] = processor["size"]["longest_edge"]
    path.write_text(json.dumps(config))
    return write_seeing(twin, target, metadata), twin


def answers(folder: Path) -> list[list[int]]:
    """Greedy tokens of prompts with and without pictures."""
    engine = Engine(folder, kv_cache_memory_bytes=8 << 20)
    prompts: list[list[Any]] = [
        [[5, 9, 77], drawn(60, 44, seed=1), [20, 31]],
        [[8], drawn(30, 90, seed=2), [7, 8], drawn(100, 33, seed=3), [4]],
        [[5, 9, 77, 20, 31]],
    ]
    tokens = []
    for parts in prompts:
        prompt, items = prompt_with_pictures(engine.pictures, *parts)
        tokens.append(engine.generate(prompt, greedy(TOKENS), items=items).tokens)
    engine.core.close()
    return tokens


@pytest.mark.parametrize("case", slow_but(CASES, "gemma3-narrow", "qwen2_5_vl", "qwen3_5", "llava-siglip"))
def test_pictures_are_seen_as_in_the_other_format(tmp_path: Path, case: str) -> None:
    file, twin = written(tmp_path, case)
    tokens = answers(model_folder(file))
    assert tokens == answers(twin)
    assert len({tuple(each) for each in tokens}) == len(tokens), "the outputs say nothing about the inputs"
    (tmp_path / PROJECTOR).unlink()
    alone = Engine(model_folder(file), kv_cache_memory_bytes=8 << 20)
    assert alone.generate([5, 9, 77, 20, 31], greedy(TOKENS)).tokens == tokens[2]


@pytest.mark.slow
def test_several_layers_of_siglip_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Granite Vision reads them, whose pictures are divided."""
    kind, fields = COMPOSITES["llava_next"]
    siglip = COMPOSITES["llava-siglip"][1]["vision_config"]
    layers = {"vision_config": {**siglip, "num_hidden_layers": 3}, "vision_feature_layer": [1, -2]}
    text = {"text_config": {**fields["text_config"], "model_type": "granite"}}
    others = {"vision_feature_select_strategy": "full"}
    monkeypatch.setitem(COMPOSITES, "llava_next", (kind, {**fields, **layers, **text, **others}))
    file, twin = written(tmp_path, "llava_next", {"vision.feature_layer": [1, 2]})
    assert answers(model_folder(file)) == answers(twin)


def changed(seeing: Path, target: Path, metadata: dict[str, Any], without: str = "") -> Path:
    """Write the model with a tower whose metadata is changed, and which lacks a tensor. Returns the model's path."""
    reader = gguf.GGUFReader(seeing / PROJECTOR)
    writer = gguf.GGUFWriter(target / PROJECTOR, "clip")
    values = {key: field.contents() for key, field in reader.fields.items() if key.startswith("clip.")}
    for key, value in {**values, **metadata}.items():
        if value is not None:
            add_value(writer, key, value)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, np.asarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return linked(seeing, target, MODEL)


REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "of other models": (
        {"clip.projector_type": "gemma3"},
        UnsupportedModel,
        r"architecture gemma3, but model\.gguf .*'llama'",
    ),
    "of another width": (
        {"clip.vision.projection_dim": 32},
        UnsupportedModel,
        r"embeddings of 32 values, but those of model\.gguf have 64",
    ),
    "without a type": ({"clip.projector_type": None}, BrokenFolder, r"no clip\.vision\.projector_type"),
    "without layers": ({"clip.vision.block_count": 0}, BrokenFolder, r"block_count must be above 0, not 0"),
    "with too many layers": (
        {"clip.vision.block_count": 1 << 31},
        BrokenFolder,
        "has 38 tensors, but its metadata 2147483648 layers",
    ),
    "without colors": (
        {"clip.vision.image_mean": [0.5]},
        BrokenFolder,
        r"clip\.vision\.image_mean must have 3 numbers",
    ),
    "with a text for a number": (
        {"clip.vision.image_size": "large"},
        BrokenFolder,
        r"clip\.vision\.image_size must be an integer, not 'large'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_towers_that_cannot_be_used_are_refused(seeing: Path, tmp_path: Path, case: str) -> None:
    metadata, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        model_folder(changed(seeing, tmp_path, metadata))
    assert str(caught.value).startswith(PROJECTOR)


@pytest.mark.parametrize("key", ["projector_type", "vision.projector_type", "audio.projector_type"])
def test_towers_of_other_types_are_not_used(
    seeing: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """The model reads text, and each start says why."""
    file = changed(seeing, tmp_path, {"clip.projector_type": None, f"clip.{key}": "ldp"})
    for _ in range(2):
        caplog.clear()
        assert read_model_config(model_folder(file)).facts.pictures is None
        (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert message.startswith(f"{MODEL} reads no pictures: {PROJECTOR}, which lies beside it, has a projector of ")
        assert "the type 'ldp', which is not supported; supported are gemma3, " in message


LLAVAS: dict[str, tuple[dict[str, Any], str, str]] = {
    "of a layer that is not there": (
        {"clip.vision.feature_layer": [0, 9]},
        "",
        r"clip\.vision\.feature_layer must have numbers from 0 to 1, .* not \[0, 9\]",
    ),
    "without its last layer": ({}, "mm.2.weight", r"has no tensor mm\.2\.weight"),
}


@pytest.mark.parametrize("case", LLAVAS)
def test_other_towers_of_llava_are_refused(seeing_llava: Path, tmp_path: Path, case: str) -> None:
    metadata, without, message = LLAVAS[case]
    with pytest.raises(ModelError, match=message):
        model_folder(changed(seeing_llava, tmp_path, metadata, without))


def test_a_tensor_that_is_missing_is_named(seeing: Path, tmp_path: Path) -> None:
    folder = model_folder(changed(seeing, tmp_path, {}, without="v.blk.1.ffn_up.bias"))
    with pytest.raises(ModelError, match=r"missing.*vision_model\.encoder\.layers\.1\.mlp\.fc1\.bias"):
        load(folder)


def test_a_part_alone_is_no_model(seeing: Path, tmp_path: Path) -> None:
    path = tmp_path / "clip.gguf"
    path.symlink_to(seeing / PROJECTOR)
    with pytest.raises(UnsupportedModel, match=r"clip\.gguf is the part of a model that reads pictures"):
        model_folder(path)


def test_without_the_file_the_model_reads_no_pictures(seeing: Path, tmp_path: Path) -> None:
    file = linked(seeing, tmp_path, MODEL)
    text = model_folder(file)
    assert read_model_config(text).facts.pictures is None
    (tmp_path / PROJECTOR).symlink_to(seeing / PROJECTOR)
    assert model_folder(file) != text, "the file was not noticed"
    assert read_model_config(model_folder(file)).facts.pictures is not None


def test_the_exactest_of_several_files_is_used(seeing: Path, tmp_path: Path) -> None:
    file = linked(seeing, tmp_path, MODEL)
    names = ["mmproj-F32.gguf", "model-mmproj-f16.gguf", "mmproj-Q8_0.gguf"]
    for name in names:
        (tmp_path / name).write_bytes((seeing / PROJECTOR).read_bytes())
    assert (model_folder(file) / "mmproj.gguf").resolve().name == names[1]


def test_files_of_other_models_are_ignored_where_there_are_several(seeing: Path, tmp_path: Path) -> None:
    file = changed(seeing, tmp_path, {"clip.projector_type": "gemma3"})
    (tmp_path / "other.gguf").symlink_to(seeing / MODEL)
    assert read_model_config(model_folder(file)).facts.pictures is None


def test_how_pictures_are_resized_may_lie_beside(seeing: Path, tmp_path: Path) -> None:
    file = linked(seeing, tmp_path, MODEL, PROJECTOR)
    beside = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 168}, "image_mean": [0.1] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(beside | {"max_image_size": {"longest_edge": 56}}))
    pictures = read_model_config(model_folder(file)).facts.pictures
    assert pictures is not None
    assert pictures.normalization is not None
    assert pictures.normalization.mean == (0.1, 0.1, 0.1)

"""The towers of Gemma 4 and Llama 4: outputs, names and values in checkpoints, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import with_room_for_pictures
from quire.engine.build.encoder_memory import item_tokens
from quire.engine.client.pictures import TokenBudget
from quire.engine.models.errors import BrokenFolder
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy, load
from tests.support.oracle import change_weights
from tests.support.pictures import drawn
from tests.support.vision_models import SEES, make_composite, prompt_with_pictures, save_seeing

CASES = ("gemma4", "gemma4-experts", "gemma4_unified", "llama4")


def encoded_by_transformers(model: Any, case: str, picture: Image.Image) -> torch.Tensor:
    eyes = SEES[case]
    inputs = eyes.inputs(eyes.processor, [picture])
    with torch.inference_mode():
        if case == "llama4":
            tiles = model.get_image_features(**inputs, return_dict=True).last_hidden_state
            encoded: torch.Tensor = model.multi_modal_projector(tiles.flatten(0, 1))
            return encoded
        return torch.cat(model.model.get_image_features(**inputs).pooler_output)


@pytest.mark.parametrize("case", CASES)
def test_towers_encode_what_transformers_does(
    seeing_models: dict[str, Any], seeing_folders: dict[str, Path], case: str
) -> None:
    """In float32, and nearly so in bfloat16, of wide, high and square pictures."""
    for dtype, bound in (("float32", 2e-5), ("bfloat16", 0.1)):
        engine = Engine(seeing_folders[case], model=ModelOptions(dtype=dtype))
        for height, width in ((60, 44), (20, 150), (200, 31), (64, 64)):
            picture = drawn(height, width, seed=height)
            _, items = prompt_with_pictures(engine.pictures, picture)
            encoded = torch.cat([engine.model.vision.encode(item) for item in items]).float()
            expected = encoded_by_transformers(seeing_models[case], case, picture)
            assert encoded.shape == expected.shape
            assert ((encoded - expected).abs().mean() / expected.abs().mean()).item() < bound


def test_bounds_that_bound_nothing(tmp_path: Path) -> None:
    """Models that were never calibrated have infinite bounds; NaN is damage."""
    model = make_composite("gemma4")
    for name, buffer in model.named_buffers():
        if "put_m" in name:
            buffer.fill_(torch.inf if name.endswith("max") else -torch.inf)
    folder = save_seeing(model, "gemma4", tmp_path)
    engine, picture = Engine(folder), drawn(50, 61)
    _, (item,) = prompt_with_pictures(engine.pictures, picture)
    torch.testing.assert_close(
        engine.model.vision.encode(item), encoded_by_transformers(model, "gemma4", picture), atol=1e-3, rtol=1e-4
    )
    name = next(name for name in load_file(folder / "model.safetensors") if name.endswith("input_max"))
    change_weights(folder, {name: torch.tensor(torch.nan)})
    with pytest.raises(BrokenFolder, match="NaN or infinite"):
        load(folder)


def test_names_of_the_unified_model(seeing_folders: dict[str, Path], tmp_path: Path) -> None:
    """Those of published checkpoints, which transformers saves too, and those of its modules."""
    source = seeing_folders["gemma4_unified"]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("vision_embedder.", "embed_vision.") for name in weights}
    projection = "embed_vision.embedding_projection.weight"
    (published,) = (name for name in weights if name.endswith(projection))
    names[published] = published.replace(projection, f"embed_vision.multimodal_embedder.{projection[13:]}")
    assert sum(new != old for old, new in names.items()) > 5
    save_file({names[name]: tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    prompt, items = prompt_with_pictures(Engine(source).pictures, [5, 9], drawn(50, 61), [7])
    answers = [Engine(folder).generate(prompt, greedy(6), items=items).tokens for folder in (source, tmp_path)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("case", "fields", "processor", "reason"),
    [
        ("gemma4", {}, {"max_soft_tokens": 71}, "max_soft_tokens is 71"),
        ("gemma4", {}, {"max_soft_tokens": 280}, "max_soft_tokens is 280"),  # the table of positions ends
        ("gemma4", {}, {"pooling_kernel_size": 3}, "stands for 8x8 pixels in config.json, but for 12x12"),
        ("gemma4_unified", {"sliding_window": 64}, {}, "max_soft_tokens is 70"),
        ("llama4", {}, {"size": {"height": 28, "width": 28}}, "reads pictures of 56x56 pixels"),
        ("llama4", {}, {"max_patches": 100}, "max_patches is 100"),
        ("llama4", {"patch_size": 0}, {}, "patch_size 0"),
        ("llama4", {"pixel_shuffle_ratio": 0.1}, {}, "have no token"),
        ("gemma4", {"pooling_kernel_size": 0}, {}, "stands for 0x0"),
    ],
)
def test_what_is_not_supported_is_named(
    seeing_folders: dict[str, Path],
    tmp_path: Path,
    case: str,
    fields: dict[str, Any],
    processor: dict[str, Any],
    reason: str,
) -> None:
    """The model answers text then."""
    for name, changed in (("config.json", fields), ("preprocessor_config.json", processor)):
        config = json.loads((seeing_folders[case] / name).read_text())
        part = "text_config" if "sliding_window" in changed else "vision_config"
        (config[part] if name == "config.json" else config).update(changed)
        (tmp_path / name).write_text(json.dumps(config))
    config = read_model_config(tmp_path)
    assert config.facts.pictures is None
    assert reason in (config.text_only or "")


def test_larger_pictures_than_the_config_says(seeing_folders: dict[str, Path], tmp_path: Path) -> None:
    """Requests may ask for as many tokens as the encoder has positions for."""
    for positions, largest in ((256, 70), (300, 140), (10240, 1120)):
        config = json.loads((seeing_folders["gemma4"] / "config.json").read_text())
        config["vision_config"]["position_embedding_size"] = positions
        (tmp_path / "config.json").write_text(json.dumps(config))
        processor = (seeing_folders["gemma4"] / "preprocessor_config.json").read_text()
        (tmp_path / "preprocessor_config.json").write_text(processor)
        pictures = read_model_config(tmp_path).facts.pictures
        assert pictures is not None
        assert pictures.info.geometry == TokenBudget(multiple=8, max_tokens=70, largest=largest)
        assert item_tokens(pictures.info.geometry, 4096) == largest


def test_steps_have_room_for_a_picture_that_is_computed_as_a_whole(seeing_folders: dict[str, Path]) -> None:
    options = EngineOptions(max_num_batched_tokens=32)
    for case, tokens in (("gemma4-experts", 70), ("gemma4_unified", 70), ("gemma4", 32)):
        config = read_model_config(seeing_folders[case])
        assert with_room_for_pictures(options, config).max_num_batched_tokens == tokens

"""CLIP, SigLIP, ColPali and ColQwen2 embed texts and pictures as transformers does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import with_room_for_pictures
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PictureItem
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from quire.multimodal.pictures.embeddings import embeddings_item, embeddings_layout
from quire.multimodal.pictures.layout import layout
from quire.multimodal.pictures.pixels import picture_pixels
from tests.support.engine import Engine, load
from tests.support.pictures import drawn
from tests.support.retrieval_models import (
    DUAL_ENCODERS,
    make_dual_encoder,
    make_late_interaction,
    picture_embedding,
    save_dual_encoder,
    save_late_interaction,
    text_embedding,
    token_embeddings,
)
from tests.support.video_models import filmed, hidden_of_media, prompt_with_media, write_processors
from tests.support.vision_models import SEES, prompt_with_pictures

EMBED = PoolingParams(task="embed")
TEXTS = {
    "clip": [[298, 5, 9, 299], [298, 7, 299], [298, 5, 11, 299]],
    "siglip": [[5, 9, *[1] * 10], [7, *[1] * 11]],  # padded
    "siglip2": [[5, 9, *[0] * 10]],
}
FIRST, SECOND = drawn(60, 44), drawn(30, 90, seed=3)


@pytest.fixture(scope="module")
def dual_encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    made = {kind: make_dual_encoder(kind) for kind in DUAL_ENCODERS}
    return {kind: (made[kind], save_dual_encoder(made[kind], kind, tmp_path_factory.mktemp(kind))) for kind in made}


def alone(engine: Engine, picture: Image.Image) -> tuple[list[int], tuple[PictureItem, ...]]:
    """The prompt of a picture, and its item."""
    info = engine.pictures
    pixels = picture_pixels(info.geometry, picture, layout(info, picture.height, picture.width))
    digest = hashlib.sha256(pixels.tobytes()).digest()
    return [info.placeholder], (PictureItem(hash=digest, length=1, pixels=np.ascontiguousarray(pixels)),)


@pytest.mark.parametrize("kind", DUAL_ENCODERS)
def test_texts_and_pictures_are_in_one_space(dual_encoders: dict[str, tuple[Any, Path]], kind: str) -> None:
    """All in one step, texts of several lengths among them."""
    model, folder = dual_encoders[kind]
    engine = Engine(folder)
    assert (engine.pools.tasks, engine.pools.score_method) == (("embed",), "cosine")
    assert engine.pools.padded_to == (0 if kind == "clip" else 12)
    expected = {}
    for index, tokens in enumerate(TEXTS[kind]):
        engine.add(f"text-{index}", tokens, EMBED)
        expected[f"text-{index}"] = text_embedding(model, tokens)
    for index, picture in enumerate((FIRST, SECOND)):
        prompt, items = alone(engine, picture)
        engine.add(f"picture-{index}", prompt, EMBED, items=items)
        expected[f"picture-{index}"] = picture_embedding(model, kind, picture)
    engine.run()
    for name, vector in expected.items():
        output = engine.results[name].pooled
        assert output is not None, engine.results[name].error
        torch.testing.assert_close(torch.from_numpy(output.data), vector, atol=1e-4, rtol=0)


def test_a_prompt_is_a_text_or_a_picture(dual_encoders: dict[str, tuple[Any, Path]]) -> None:
    engine = Engine(dual_encoders["clip"][1])
    _, items = alone(engine, FIRST)
    error = engine.generate([298, 5, 299], EMBED, items=items).error
    assert error == "a prompt is either a text or one picture with one token, not 1 in 3 tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "--quantization is not supported for clip"),
        ({"task": "classify"}, "embeds texts and pictures"),
        ({"model_impl": "transformers"}, "only Quire's own implementation"),
        ({"hf_overrides": {"architectures": ["CLIPTextModelWithProjection"]}}, "is not supported"),
    ],
)
def test_what_is_not_supported(
    dual_encoders: dict[str, tuple[Any, Path]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Engine(dual_encoders["clip"][1], model=ModelOptions(**options))


@pytest.mark.parametrize("kind", DUAL_ENCODERS)
def test_embeddings_of_pictures_that_clients_have_computed(
    dual_encoders: dict[str, tuple[Any, Path]], kind: str
) -> None:
    model, folder = dual_encoders[kind]
    engine = Engine(folder)
    size = engine.pictures.embedding_size
    assert size == engine.pools.embedding_size
    expected = picture_embedding(model, kind, FIRST)
    values = (3 * expected[None]).numpy()
    item = embeddings_item(values, embeddings_layout(engine.pictures, values, None))
    output = engine.generate([engine.pictures.placeholder], EMBED, items=(item,)).pooled
    assert output is not None
    torch.testing.assert_close(torch.from_numpy(output.data), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "inner",
    ["paligemma", "qwen2_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("paligemma2", "qwen2_5_vl"))],
)
def test_tokens_of_pictures_have_embeddings(tmp_path: Path, inner: str) -> None:
    model = make_late_interaction(inner)
    step = SEES[inner].least_step if SEES[inner].least_step > 1 else 16
    engine = Engine(save_late_interaction(model, inner, tmp_path), max_num_batched_tokens=step)
    assert (engine.pools.tasks, engine.pools.score_method) == (("token_embed",), "max_sim")
    parts: list[list[Any]] = [[[5, 9, 77, 8]], [[5, 9], FIRST, [7]], [[5], SECOND, [20, 31], FIRST, [8, 101]]]
    for index, pieces in enumerate(parts):
        prompt, items = prompt_with_pictures(engine.pictures, *pieces)
        output = engine.generate(prompt, PoolingParams(task="token_embed"), items=items).pooled
        assert output is not None
        pictures = [piece for piece in pieces if isinstance(piece, Image.Image)]
        expected = token_embeddings(model, inner, prompt, pictures)
        torch.testing.assert_close(torch.from_numpy(output.data), expected, atol=1e-4, rtol=0, msg=f"prompt {index}")


@pytest.mark.parametrize("inner", [pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl"])
def test_tokens_of_videos_have_embeddings(tmp_path: Path, inner: str) -> None:
    model = make_late_interaction(inner)
    folder = save_late_interaction(model, inner, tmp_path)
    write_processors(inner, folder)
    engine = Engine(folder, max_num_batched_tokens=16)
    parts: list[Any] = [[5, 9], filmed(5, 60, 44, seed=1), [20, 31], FIRST, [8]]
    prompt, items = prompt_with_media(engine.pictures, *parts)
    output = engine.generate(prompt, PoolingParams(task="token_embed"), items=items).pooled
    assert output is not None
    with torch.inference_mode():
        hidden = model.embedding_proj_layer(hidden_of_media(model.vlm, inner, engine.pictures, parts))
        expected = torch.nn.functional.normalize(hidden, dim=-1)
    torch.testing.assert_close(torch.from_numpy(output.data), expected, atol=1e-4, rtol=0)


def test_prompts_that_attend_in_both_directions_fit_into_a_step(tmp_path: Path) -> None:
    """Their length is the context length, so that texts are truncated to it; several prompts share a step."""
    model = make_late_interaction("paligemma")
    folder = save_late_interaction(model, "paligemma", tmp_path)
    engine = Engine(folder, max_num_batched_tokens=20)
    assert engine.info.max_model_len == 20
    prompts = {str(length): [5 + index for index in range(length)] for length in (7, 13, 20, 3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, PoolingParams(task="token_embed"))
    engine.run()
    for name, prompt in prompts.items():
        output = engine.results[name].pooled
        assert output is not None
        expected = token_embeddings(model, "paligemma", prompt, [])
        torch.testing.assert_close(torch.from_numpy(output.data), expected, atol=1e-4, rtol=0)
    assert "the context allows at most 20" in str(engine.generate([5] * 21, PoolingParams(task="token_embed")).error)
    with pytest.raises(ModelError, match="--max-model-len 30 is more than --max-num-batched-tokens 20"):
        Engine(folder, model=ModelOptions(max_model_len=30), max_num_batched_tokens=20)


def test_steps_have_room_for_a_page(tmp_path: Path) -> None:
    """Unless the operator says how large they are."""
    save_late_interaction(make_late_interaction("paligemma"), "paligemma", tmp_path)
    config = read_model_config(tmp_path)
    assert with_room_for_pictures(EngineOptions(), config).max_num_batched_tokens == 4 + 512
    large = EngineOptions(max_num_batched_tokens=2048)
    assert with_room_for_pictures(large, config) is large


def test_names_of_weights_of_other_versions_of_transformers(tmp_path: Path) -> None:
    save_late_interaction(make_late_interaction("paligemma"), "paligemma", tmp_path)
    expected = load(tmp_path).model.state_dict()
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for before, after in (
        ("vlm.language_model.model.", "vlm.model.language_model."),
        ("vlm.vision_tower.", "vlm.model.vision_tower.vision_model."),
    ):
        assert any(name.startswith(before) for name in tensors)
        tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    tensors["vlm.language_model.lm_head.weight"] = torch.zeros(2)  # which is not read
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_pictures_of_another_size_than_the_encoder_reads(tmp_path: Path) -> None:
    save_late_interaction(make_late_interaction("paligemma"), "paligemma", tmp_path)
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("28", "42"))
    reason = read_model_config(tmp_path).text_only
    assert reason == "the encoder reads pictures of 28x28 pixels, but preprocessor_config.json makes 42x42"

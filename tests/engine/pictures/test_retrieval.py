"""CLIP, SigLIP and ColQwen2 embed texts and pictures as transformers does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PictureItem
from quire.engine.models.errors import ModelError
from quire.multimodal.pictures.layout import layout
from quire.multimodal.pictures.pixels import picture_pixels
from tests.support.engine import Engine
from tests.support.pictures import drawn
from tests.support.retrieval_models import (
    DUAL_ENCODERS,
    make_colqwen,
    make_dual_encoder,
    picture_embedding,
    save_colqwen,
    save_dual_encoder,
    text_embedding,
    token_embeddings,
)
from tests.support.video_models import filmed, hidden_of_media, prompt_with_media, write_processors
from tests.support.vision_models import prompt_with_pictures

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


@pytest.mark.parametrize("inner", ["qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_tokens_of_pictures_have_embeddings(tmp_path: Path, inner: str) -> None:
    model = make_colqwen(inner)
    engine = Engine(save_colqwen(model, inner, tmp_path), max_num_batched_tokens=16)
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
    model = make_colqwen(inner)
    folder = save_colqwen(model, inner, tmp_path)
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

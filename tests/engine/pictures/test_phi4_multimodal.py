"""Phi-4 Multimodal: audio beside pictures, and the names that its authors give to tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.families.phi4_multimodal import module_name
from quire.multimodal.audio.items import token_count
from tests.support.audio_models import noise, span, transformers_inputs
from tests.support.engine import Engine, greedy
from tests.support.phi4_tiles import Phi4Tiles
from tests.support.pictures import drawn
from tests.support.vision_models import prompt_with_pictures

PART = "model.embed_tokens_extend.image_embed."


def generated(model: Any, prompt: list[int], inputs: dict[str, Any]) -> list[int]:
    """Eight greedy tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **inputs)
    return [int(token) for token in out[0, len(prompt) :]]


def test_audio_beside_pictures_is_projected_apart(
    seeing_models: dict[str, Any], seeing_folders: dict[str, Path]
) -> None:
    """Both are computed with the adapter for pictures; the same audio alone is encoded again, as it is without one."""
    model, engine = seeing_models["phi4_multimodal"], Engine(seeing_folders["phi4_multimodal"], block_size=4)
    sound, picture = noise(0, 0.7), drawn(40, 60)
    heard = [engine.audio.placeholder] * token_count(len(sound), engine.audio)
    of_sound = transformers_inputs("phi4_multimodal", [sound])

    prompt, pictures = prompt_with_pictures(engine.pictures, [4, 7], picture, [9])
    both = [*prompt, *heard, 8]
    items = (*pictures, *span(sound, engine.audio, len(prompt)))
    expected = generated(model.adapted[0], both, {**of_sound, **Phi4Tiles().inputs([picture])})
    assert engine.generate(both, greedy(8), items=items).tokens == expected

    encoded, alone = engine.items_encoded, [4, 7, *heard, 8]
    items = tuple(span(sound, engine.audio, 2))
    assert engine.generate(alone, greedy(8), items=items).tokens == generated(model, alone, of_sound)
    assert engine.items_encoded == encoded + 1


def test_audio_that_follows_a_picture_later_is_projected_apart(seeing_folders: dict[str, Path]) -> None:
    """In an open prompt, as in a whole one."""
    engine = Engine(seeing_folders["phi4_multimodal"], block_size=4)
    sound = noise(0, 0.7)
    prompt, pictures = prompt_with_pictures(engine.pictures, [4, 7], drawn(40, 60), [9])
    heard = [engine.audio.placeholder] * token_count(len(sound), engine.audio)
    whole = engine.generate([*prompt, *heard, 8], greedy(4), items=(*pictures, *span(sound, engine.audio, len(prompt))))
    fresh = Engine(seeing_folders["phi4_multimodal"], block_size=4)
    fresh.add("open", prompt, greedy(4), items=pictures, open=True)
    fresh.run()
    fresh.extend("open", [*heard, 8], items=tuple(span(sound, engine.audio, 0)), last=True)
    fresh.run()
    assert fresh.results["open"].tokens == whole.tokens


@pytest.mark.parametrize(
    ("published", "known"),
    [
        ("glb_GN", "global_img_feature_extensor"),
        ("sub_GN", "sub_img_feature_extensor"),
        ("img_projection.0.weight", "img_projection_up.weight"),
        ("img_projection.2.bias", "img_projection_down.bias"),
        ("img_processor.encoder.layers.3.mlp.fc1.weight", "img_processor.encoder.layers.3.mlp.fc1.weight"),
        ("img_processor.head.probe", None),
        ("img_processor.post_layernorm.bias", None),
    ],
)
def test_names_of_its_authors(published: str, known: str | None) -> None:
    expected = None if known is None else f"{PART.removeprefix('model.')}{known}"
    assert module_name(f"{PART}{published}") == expected

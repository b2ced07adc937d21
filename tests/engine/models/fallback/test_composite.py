"""Models around language models: what only a family can do is found out and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from quire.engine.client.picture_processor import ProcessedPicture
from quire.engine.models.checkpoint.weights import allocate
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.fallback import composite
from quire.engine.models.fallback.composite import CompositeShell, FallbackEncoder
from tests.support.pictures import drawn
from tests.support.vision_models import COMPOSITES, PICTURE, SEES, make_composite


def encoder_of(model: Any, case: str) -> FallbackEncoder:
    """The encoder of a model that has a family, as if it had none, with the arrays of its image processor."""
    parts = CompositeShell(model.config, reads_pictures=True)
    pictures: list[Image.Image] = [drawn(60, 44)]
    inputs = {name: value.numpy() for name, value in SEES[case].inputs(SEES[case].processor, pictures).items()}
    tokens = _tokens_of(model, inputs)
    picture = ProcessedPicture("", np.full(tokens, PICTURE, np.int32), inputs)
    encoder = FallbackEncoder(parts, PICTURE, (picture,))
    allocate(encoder, torch.float32, torch.device("cpu"))
    encoder.make_buffers(torch.device("cpu"))
    weights = dict(model.model.named_parameters())
    for name, parameter in encoder.tower.named_parameters():
        parameter.data.copy_(weights[name])
    return encoder


def _tokens_of(model: Any, inputs: dict[str, Any]) -> int:
    with torch.inference_mode():
        features = model.model.get_image_features(**{name: torch.tensor(value) for name, value in inputs.items()})
    pooled = features.pooler_output
    return sum(len(part) for part in pooled) if pooled[0].dim() > 1 else len(pooled)


@pytest.fixture(scope="module")
def mistral() -> FallbackEncoder:
    """An encoder that can be used."""
    return encoder_of(make_composite("mistral3"), "mistral3")


@pytest.mark.parametrize("case", [pytest.param("llava", marks=pytest.mark.slow), "mistral3"])
def test_embeddings_in_the_place_of_placeholders_are_accepted(case: str) -> None:
    model = make_composite(case)
    encoder = encoder_of(model, case)
    encoder.check()
    item = encoder.largest
    assert item is not None
    with torch.inference_mode():
        encoded = encoder.encode(item)
    assert encoded.shape == (item.length, 64)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("gemma3-narrow", "attention in both directions"),
        ("paligemma", "attention in both directions"),
        ("qwen2_5_vl", "M-RoPE"),
        ("glm4v", "M-RoPE"),
    ],
)
def test_what_a_model_does_before_it_is_called_is_refused(case: str, reason: str) -> None:
    kind, fields = COMPOSITES[case]
    with pytest.raises(UnsupportedModel, match=reason):
        CompositeShell(AutoConfig.for_model(kind, **copy.deepcopy(fields)), reads_pictures=True)


def test_positions_of_pictures_are_not_refused_where_none_are_read() -> None:
    kind, fields = COMPOSITES["qwen2_5_vl"]
    shell = CompositeShell(AutoConfig.for_model(kind, **copy.deepcopy(fields)), reads_pictures=False)
    assert shell.current_name("model.layers.0.mlp.up_proj.weight") == "model.language_model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param("gemma3-narrow", "attention in both directions", marks=pytest.mark.slow),
        ("qwen2_5_vl", "M-RoPE"),
        pytest.param("qwen3_vl", "M-RoPE", marks=pytest.mark.slow),
    ],
)
def test_more_than_embeddings_is_refused(monkeypatch: pytest.MonkeyPatch, case: str, reason: str) -> None:
    """By what the language model is called with, even if nothing else tells it."""
    monkeypatch.setattr(composite, "_check_generation", lambda *_, **__: None)
    with pytest.raises(UnsupportedModel, match=reason):
        encoder_of(make_composite(case), case).check()


def _change_text(tokens: list[int], call: dict[str, Any]) -> None:
    call["inputs_embeds"][0, torch.tensor(tokens) != PICTURE] = 1.0


def _depend_on_text(tokens: list[int], call: dict[str, Any]) -> None:
    places = torch.tensor(tokens) == PICTURE
    call["inputs_embeds"][0, places] += float(not places.all())


def _add(name: str, value: torch.Tensor) -> Callable[[list[int], dict[str, Any]], None]:
    return lambda _, call: call.update({name: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_change_text, "changes the embeddings of other tokens"),
        (_depend_on_text, "encodes a picture differently with text around it"),
        (_add("position_ids", torch.zeros(3, 1, 6)), "M-RoPE"),
        (_add("attention_mask", torch.zeros(1, 1, 6, 6)), "attention in both directions"),
        (_add("deepstack_visual_embeds", torch.zeros(1, 64)), "DeepStack"),
    ],
    ids=["embeddings of text", "text around a picture", "positions", "mask", "levels"],
)
def test_what_is_not_generic_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    mistral: FallbackEncoder,
    change: Callable[[list[int], dict[str, Any]], None],
    reason: str,
) -> None:
    call_model = mistral._called

    def changed(tokens: list[int], inputs: Any) -> dict[str, Any]:
        call = call_model(tokens, inputs)
        change(tokens, call)
        return call

    monkeypatch.setattr(mistral, "_called", changed)
    with pytest.raises(UnsupportedModel, match=reason):
        mistral.check()


def test_work_behind_the_language_model_is_refused(mistral: FallbackEncoder) -> None:
    doubled = mistral.tower.register_forward_hook(lambda _, __, output: (output[0] * 2,))
    with doubled, pytest.raises(UnsupportedModel, match="changes what its language model computes"):
        mistral.check()

"""Architectures without a family: transformers prepares and encodes pictures, and Quire's decoder reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config.options import ModelOptions
from quire.engine.client.protocol import EncoderInput
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy
from tests.support.fallback_composites import FALLBACKS, expected_tokens, make_fallback, processed_prompt, save_fallback
from tests.support.pictures import drawn
from tests.support.vision_models import MadeWhenAsked

SLOW = pytest.mark.slow
# Heights and widths of the pictures in each prompt.
SIZES: list[list[tuple[int, int]]] = [[(60, 44)], [(30, 90), (41, 40), (100, 33)], [], [(64, 64)]]


@pytest.fixture(scope="module")
def fallback_models() -> dict[str, Any]:
    return MadeWhenAsked(make_fallback)


@pytest.fixture(scope="module")
def fallback_folders(fallback_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return MadeWhenAsked(lambda case: save_fallback(fallback_models[case], case, tmp_path_factory.mktemp(case)))


def text_of(case: str, index: int) -> str:
    """A text with a marker for each picture of a prompt."""
    marker = FALLBACKS[case].marker
    return f"a{index}" + "".join(f"{marker}\n{place}?" for place in range(len(SIZES[index]))) + "\nb"


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "aya_vision" else SLOW) for case in FALLBACKS])
def test_greedy_tokens_equal_transformers(
    fallback_models: dict[str, Any], fallback_folders: dict[str, Path], case: str
) -> None:
    """All together in small chunks, then each alone: one picture, three of different sizes, none."""
    folder = fallback_folders[case]
    engine = Engine(folder, block_size=8, max_num_batched_tokens=11, max_num_seqs=5)
    prompts, expected = [], []
    for index, sizes in enumerate(SIZES):
        pictures = [drawn(*size, seed=index + size[0]) for size in sizes]
        prompt, items = processed_prompt(folder, engine.pictures, text_of(case, index), pictures)
        tokens, answer = expected_tokens(fallback_models[case], case, text_of(case, index), pictures, 12)
        assert prompt == tokens
        prompts.append((prompt, items))
        expected.append(answer)
        engine.add(str(index), prompt, greedy(12), items=items)
    engine.run()
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].error for index in range(len(expected))] == [None] * len(expected)
    assert [engine.results[str(index)].tokens for index in range(len(expected))] == expected
    alone = Engine(folder)
    assert [alone.generate(prompt, greedy(12), items=items).tokens for prompt, items in prompts] == expected
    text_only = Engine(folder, model=ModelOptions(language_model_only=True))
    assert [text_only.generate(prompt, greedy(12)).tokens for prompt, items in prompts if not items] == [expected[2]]


def test_a_picture_that_cannot_be_encoded_ends_its_own_request_alone(fallback_folders: dict[str, Path]) -> None:
    """Its values are too large, or its arrays have fewer tokens than the prompt."""
    folder = fallback_folders["aya_vision"]
    engine = Engine(folder)
    prompt, (item,) = processed_prompt(folder, engine.pictures, text_of("aya_vision", 0), [drawn(60, 44)])
    expected = engine.generate(prompt, greedy(6), items=(item,)).tokens
    changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
        "large": lambda values: np.full_like(values, 3e38),
        "few": lambda values: values[:1],
    }
    for name, change in changes.items():
        inputs = tuple(
            EncoderInput(name=part.name, values=change(part.values)) if part.values.dtype == np.float32 else part
            for part in item.inputs
        )
        engine.add(name, prompt, greedy(6), items=(msgspec.structs.replace(item, inputs=inputs, hash=name.encode()),))
    engine.add("right", prompt, greedy(6), items=(item,))
    engine.run()
    for name in changes:
        result = engine.results[name]
        assert (result.is_refused, result.tokens) == (True, [])
        assert result.error is not None
        assert f"The picture at token {item.start} of the prompt cannot be encoded" in result.error
    assert engine.results["right"].tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", FALLBACKS)
def test_the_pictures_are_seen(fallback_folders: dict[str, Path], case: str) -> None:
    """Other pictures under the same tokens give another text."""
    engine = Engine(fallback_folders[case])
    texts = set()
    for seed in range(3):
        text, picture = f"a{FALLBACKS[case].marker}b", drawn(50, 60, seed=seed)
        prompt, items = processed_prompt(fallback_folders[case], engine.pictures, text, [picture])
        texts.add(tuple(engine.generate(prompt, greedy(12), items=items).tokens))
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_token_id": 7}, "the processor writes no token 7"),
        ({"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}}, "M-RoPE"),
        ({"text_config": {"model_type": "rwkv"}}, "a language model of type 'rwkv' is not supported here"),
    ],
)
def test_what_only_a_family_can_do_is_refused_when_the_config_is_read(
    fallback_folders: dict[str, Path], changes: dict[str, Any], reason: str
) -> None:
    """Only the language model can be asked for then."""
    with pytest.raises(ModelError, match=reason):
        read_model_config(fallback_folders["aya_vision"], "quire", changes)


def test_what_matters_with_pictures_only_is_not_refused_without_them(fallback_folders: dict[str, Path]) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    changes = {"text_config": {"rope_parameters": rope}}
    alone = read_model_config(fallback_folders["aya_vision"], "quire", changes, language_model_only=True)
    assert alone.facts.pictures is None


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer.json"])
def test_folders_without_a_processor_are_refused(fallback_models: dict[str, Any], tmp_path: Path, name: str) -> None:
    folder = save_fallback(fallback_models["aya_vision"], "aya_vision", tmp_path)
    (folder / name).unlink()
    with pytest.raises(ModelError, match="--language-model-only"):
        read_model_config(folder)
    alone = read_model_config(folder, language_model_only=True)
    assert alone.facts.pictures is None

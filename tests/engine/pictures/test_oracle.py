"""Language models that read pictures compute what transformers computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.variants import slow_but
from tests.support.vision_models import SEES, expected_of_pictures, prompt_with_pictures

TOKENS = 7  # of each answer
# Heights and widths of the pictures in each prompt.
SIZES: list[list[tuple[int, int]]] = [[(60, 44)], [(30, 90), (41, 40), (100, 33)], [], [(64, 64)]]


def pieces(sizes: list[tuple[int, int]]) -> list[Any]:
    """Pictures with text between."""
    parts: list[Any] = [[5, 9, 77]]
    for index, (height, width) in enumerate(sizes):
        parts += [drawn(height, width, seed=index + height), [20 + index, 31]]
    return [*parts, [8, 101]]


def pictures_of(parts: list[Any]) -> list[Image.Image]:
    return [part for part in parts if isinstance(part, Image.Image)]


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        product(SEES, ["cpu", "reference"]),
        *((case, "cpu") for case in SEES if case != "paligemma"),  # PaliGemma 2 has all that it has, and windows
        *((case, "reference") for case in ("gemma3-narrow", "mistral3", "qwen3_vl")),
    ),
)
def test_greedy_tokens_equal_transformers(
    seeing_models: dict[str, Any], seeing_folders: dict[str, Path], case: str, device: str
) -> None:
    """All together in small chunks, then each alone."""
    options = ModelOptions(device=device)
    step = max(11, SEES[case].least_step)
    engine = Engine(seeing_folders[case], model=options, block_size=8, max_num_batched_tokens=step, max_num_seqs=5)
    expected = []
    for index, sizes in enumerate(SIZES):
        parts = pieces(sizes)
        prompt, items = prompt_with_pictures(engine.pictures, *parts)
        engine.add(str(index), prompt, greedy(TOKENS), items=items)
        expected.append(expected_of_pictures(seeing_models[case], case, prompt, pictures_of(parts), TOKENS))
    engine.run()
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].error for index in range(len(expected))] == [None] * len(expected)
    assert [engine.results[str(index)].tokens for index in range(len(expected))] == expected
    alone = Engine(seeing_folders[case], model=options)
    for index, sizes in enumerate(SIZES):
        prompt, items = prompt_with_pictures(alone.pictures, *pieces(sizes))
        assert alone.generate(prompt, greedy(TOKENS), items=items).tokens == expected[index]


@pytest.mark.parametrize("case", SEES)
def test_the_pictures_are_seen(seeing_folders: dict[str, Path], case: str) -> None:
    """Other pictures under the same tokens give another text."""
    engine = Engine(seeing_folders[case])
    texts = set()
    for seed in range(4):
        prompt, items = prompt_with_pictures(engine.pictures, [5, 9], drawn(50, 60, seed=seed), [7])
        texts.add(tuple(engine.generate(prompt, greedy(12), items=items).tokens))
    assert len(texts) == 4

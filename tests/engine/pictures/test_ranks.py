"""Models that read pictures on several ranks: each rank of the first stage has the whole tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, greedy
from tests.support.parallel import PP, TP, running
from tests.support.pictures import drawn
from tests.support.vision_models import SEES, prompt_with_pictures

CASES = [
    ("qwen2_5_vl", {**TP, **PP}),
    ("paligemma2", TP),  # whose prompt is read in both directions
    *(pytest.param(case, TP, marks=pytest.mark.slow) for case in ("qwen3_vl", "mistral3", "gemma3-narrow", "gemma3n")),
    pytest.param("smolvlm", PP, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "parallel"), CASES, ids=str)
def test_tokens_are_those_of_one_rank(seeing_folders: dict[str, Path], case: str, parallel: dict[str, Any]) -> None:
    """In small chunks, together with text, and again from the caches."""
    folder = seeing_folders[case]
    parts: list[list[Any]] = [[[5, 9], drawn(60, 44), [8]], [[5], drawn(30, 90), [7, 7], drawn(40, 40), [3]], [[1, 2]]]
    single = Engine(folder, enable_prefix_caching=False)
    requests = [prompt_with_pictures(single.pictures, *each) for each in parts]
    expected = [single.generate(prompt, greedy(6), items=items).tokens for prompt, items in requests]
    step = max(11, SEES[case].least_step)
    with running(folder, parallel, block_size=4, max_num_batched_tokens=step, max_num_seqs=4) as engine:
        for turn in range(2):
            for index, (prompt, items) in enumerate(requests):
                engine.add(f"{turn}-{index}", prompt, greedy(6), items=items)
            engine.run()
            assert [engine.results[f"{turn}-{index}"].tokens for index in range(3)] == expected


def test_a_stage_without_layers_for_all_levels_reads_text(seeing_folders: dict[str, Path]) -> None:
    """Levels are added behind two layers, but the first stage has one."""
    folder = seeing_folders["qwen3_vl"]
    with running(folder, PP) as engine:
        single = Engine(folder)
        prompt, items = prompt_with_pictures(single.pictures, [1], drawn(20, 20), [2])
        assert engine.generate(prompt, greedy(2), items=items).error == (
            "the model does not accept pictures, only text"
        )
        assert engine.generate([1, 2, 3], greedy(3)).tokens == single.generate([1, 2, 3], greedy(3)).tokens

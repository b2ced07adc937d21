"""Language models that read videos compute what transformers computes with the same frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.video_models import (
    cases,
    expected_of_media,
    filmed,
    hidden_of_media,
    prompt_with_media,
    save_watching,
)
from tests.support.vision_models import SEES, MadeWhenAsked

TOKENS = 10


def prompts(case: str) -> list[list[Any]]:
    """A video; two of different lengths, sizes and rates; a video and a picture; text alone."""
    together: list[Any] = [[5], filmed(2, 56, 60, seed=4), [31, 7], drawn(60, 44, seed=5), [8]]
    if case.startswith("glm"):  # transformers cannot tell pictures from videos there
        together.remove(together[3])
    short = 4 if case == "llava_onevision" else 3  # transformers wants as many frames of each video there
    return [
        [[5, 9, 77], filmed(5, 60, 44, seed=1), [20, 31, 8]],
        [[5, 9], filmed(4, 44, 90, seed=2, fps=0.5), [20], filmed(short, 40, 40, seed=3), [8, 101]],
        together,
        [[5, 9, 77, 12]],
    ]


@pytest.fixture(scope="module")
def watching_folders(seeing_models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models with the configs of their video processors."""
    return MadeWhenAsked(lambda case: save_watching(seeing_models[case], case, tmp_path_factory.mktemp(f"v-{case}")))


@pytest.mark.parametrize("case", cases("gemma4", "gemma4_unified", "qwen2_5_vl", "smolvlm"))
def test_greedy_tokens_equal_transformers(
    seeing_models: dict[str, Any], watching_folders: dict[str, Path], case: str
) -> None:
    """All together in small chunks, then each alone."""
    step = max(11, SEES[case].least_step)
    engine = Engine(watching_folders[case], block_size=8, max_num_batched_tokens=step, max_num_seqs=5)
    info, expected = engine.pictures, []
    assert info.video is not None
    for index, parts in enumerate(prompts(case)):
        prompt, items = prompt_with_media(info, *parts)
        engine.add(str(index), prompt, greedy(TOKENS), items=items)
        expected.append(expected_of_media(seeing_models[case], case, info, parts, TOKENS))
    engine.run()
    assert [engine.results[str(index)].error for index in range(len(expected))] == [None] * len(expected)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].tokens for index in range(len(expected))] == expected
    alone = Engine(watching_folders[case])
    for parts, tokens in zip(prompts(case), expected, strict=True):
        prompt, items = prompt_with_media(info, *parts)
        assert alone.generate(prompt, greedy(TOKENS), items=items).tokens == tokens


@pytest.mark.parametrize("case", cases("qwen2_5_vl"))
def test_embeddings_of_videos_equal_transformers(
    seeing_models: dict[str, Any], watching_folders: dict[str, Path], case: str
) -> None:
    """Of the last token and of all, in small chunks."""
    step = max(11, SEES[case].least_step)
    options = ModelOptions(convert="embed")
    engine = Engine(watching_folders[case], model=options, max_num_batched_tokens=step, max_num_seqs=5)
    for index, parts in enumerate(prompts(case)[:2]):
        prompt, items = prompt_with_media(engine.pictures, *parts)
        hidden = hidden_of_media(seeing_models[case].model, case, engine.pictures, parts)
        expected = torch.nn.functional.normalize(hidden, dim=-1)
        for params, vectors in (
            (PoolingParams(task="embed"), expected[-1]),
            (PoolingParams(task="token_embed"), expected),
        ):
            output = engine.generate(prompt, params, items=items).pooled
            assert output is not None, f"{params.task} of prompt {index}"
            torch.testing.assert_close(torch.from_numpy(output.data), vectors, atol=1e-4, rtol=0)
    far = filmed(8, 40, 40, seed=1, fps=0.01)
    prompt, items = prompt_with_media(engine.pictures, [5, 9], far, [20])
    if engine.pictures.video is not None and engine.pictures.video.tokens_per_second:
        error = engine.generate(prompt, PoolingParams(task="embed"), items=items).error
        assert "its frames are too far apart" in (error or "")


@pytest.mark.parametrize("case", cases("qwen2_5_vl"))
def test_the_same_video_is_found_in_the_prefix_cache_and_another_is_not(
    watching_folders: dict[str, Path], case: str
) -> None:
    engine = Engine(watching_folders[case], block_size=4)
    cached: list[int] = []
    for seed in (1, 1, 2):
        prompt, items = prompt_with_media(engine.pictures, [5, 9], filmed(6, 56, 56, seed=seed), [20, 31, 8])
        cached.append(engine.generate(prompt, greedy(2), items=items).outputs[0].cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= len(prompt) - 4
    assert cached[2] < 4


def test_time_beyond_the_tokens(seeing_models: dict[str, Any], watching_folders: dict[str, Path]) -> None:
    """Positions of time may be larger than those of all tokens, but not than the context."""
    case, parts = "qwen2_5_vl", [[5, 9], filmed(8, 40, 40, seed=1, fps=0.2), [20, 31]]
    engine = Engine(watching_folders[case], model=ModelOptions(max_model_len=160))
    prompt, items = prompt_with_media(engine.pictures, *parts)
    assert max(int(item.positions.max()) for item in items if item.positions is not None) > 2 * len(prompt)
    expected = expected_of_media(seeing_models[case], case, engine.pictures, parts, 100)
    assert engine.generate(prompt, greedy(100), items=items).tokens == expected
    far = filmed(8, 40, 40, seed=1, fps=0.1)
    prompt, items = prompt_with_media(engine.pictures, [5, 9], far, [20, 31])
    assert "its frames are too far apart" in (engine.generate(prompt, greedy(2), items=items).error or "")


def test_time_beyond_the_tokens_and_preemption(watching_folders: dict[str, Path]) -> None:
    """Sequences that enter the batch again count on from the same position."""
    folder = watching_folders["qwen2_5_vl"]
    alone = Engine(folder, block_size=4, enable_prefix_caching=False)
    requests = [
        prompt_with_media(alone.pictures, [5, 9], filmed(8, 40, 40, seed=seed, fps=0.5), [20, 31]) for seed in range(3)
    ]
    expected = [alone.generate(prompt, greedy(30), items=items).tokens for prompt, items in requests]
    engine = Engine(
        folder, model=ModelOptions(max_model_len=64), block_size=4, kv_cache_memory_bytes=17 * alone.block_bytes
    )
    for index, (prompt, items) in enumerate(requests):
        engine.add(str(index), prompt, greedy(30), items=items)
    engine.run()
    assert engine.preemptions > 0
    assert [engine.results[str(index)].tokens for index in range(len(requests))] == expected

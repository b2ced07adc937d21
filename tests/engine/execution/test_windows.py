"""Layers with sliding windows give blocks back: what a sequence holds, and how many sequences fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.models.specs.cache import FullCache, WindowCache
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model

BLOCK, WINDOW, CHUNK = 4, 24, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other layer has a window of 24 tokens."""
    return save_model(make_model("gemma2"), tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(folder, block_size=BLOCK, max_num_batched_tokens=CHUNK, **options)


def whole_bytes(engine: Engine, tokens: int) -> int:
    """Bytes of a sequence of so many tokens if all layers keep all of them."""
    return -(-tokens // BLOCK) * engine.block_bytes


def test_a_sequence_holds_the_blocks_in_sight_of_layers_with_a_window(folder: Path) -> None:
    engine = engine_of(folder)
    groups = engine.model.cache_groups(256)
    assert [type(group.kind) for group in groups] == [WindowCache, FullCache]
    engine.add("a", random_prompt(1, 120), greedy(80))
    held = []
    while engine.busy:
        held.append(engine.blocks_used)
        engine.step()
    in_sight = -(-(WINDOW - 1 + CHUNK) // BLOCK) + 1
    assert max(held) <= 200 // BLOCK + in_sight
    assert held[-1] <= 200 // BLOCK + WINDOW // BLOCK + 1  # of a step with one token
    assert engine.blocks_used == 0


LONG = {f"r{index}": random_prompt(index, 100) for index in range(3)}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """The tokens after each of the long prompts."""
    roomy = engine_of(folder)
    return {name: roomy.generate(prompt, greedy(90)).tokens for name, prompt in LONG.items()}


@pytest.mark.parametrize("variant", [{}, {"in_flight": 2}, {"speculative_method": "ngram"}], ids=str)
def test_sequences_run_together_that_would_not_fit_without_windows(
    folder: Path, expected: dict[str, list[int]], variant: dict[str, Any]
) -> None:
    roomy = engine_of(folder)
    engine = engine_of(folder, kv_cache_memory_bytes=2 * whole_bytes(roomy, 200), **variant)
    for name, prompt in LONG.items():
        engine.add(name, prompt, greedy(90))
    engine.run()
    assert engine.preemptions == 0
    assert {name: engine.results[name].tokens for name in LONG} == expected


def test_a_longer_context_fits_into_the_same_memory(folder: Path) -> None:
    """Half of the layers need little more than their window."""
    roomy = engine_of(folder)
    engine = engine_of(folder, kv_cache_memory_bytes=whole_bytes(roomy, 160))
    assert engine.info.max_model_len > 220
    assert len(engine.generate(random_prompt(2, 200), greedy(500)).tokens) == engine.info.max_model_len - 200


def test_a_context_within_the_window_has_one_group(folder: Path) -> None:
    engine = engine_of(folder, model=ModelOptions(max_model_len=WINDOW))
    assert len(engine.model.cache_groups(WINDOW)) == 1
    assert engine.block_bytes * engine.info.num_blocks == engine.info.cache_bytes


def test_the_next_turn_finds_the_answer_before_it(folder: Path) -> None:
    """Also where layers with a window have given the first blocks back, and others have them."""
    roomy = engine_of(folder)
    engine = engine_of(folder, kv_cache_memory_bytes=2 * whole_bytes(roomy, 180))
    prompt = random_prompt(3, 120)
    answer = engine.generate(prompt, greedy(40)).tokens
    question = [*prompt, *answer, *random_prompt(4, 9)]
    engine.generate(random_prompt(5, 60), greedy(20))
    result = engine.generate(question, greedy(20))
    assert result.outputs[0].cached_tokens == 156  # all but the last token of the answer, in whole blocks
    assert result.tokens == Engine(folder, enable_prefix_caching=False).generate(question, greedy(20)).tokens

"""A prompt that arrives in pieces gives the tokens of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.pieces import run_in_pieces, task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def _prompts() -> dict[str, list[int]]:
    return {str(index): random_prompt(index % 4, 3 + 5 * index) for index in range(7)}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, list[int]]:
    """The tokens after each of the prompts."""
    engine = Engine(folder, enable_prefix_caching=False)
    return {name: engine.generate(prompt, task(len(prompt))).tokens for name, prompt in _prompts().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_seqs": 2},
        {"in_flight": 2, "block_size": 4},
        {"enable_prefix_caching": False},
        {"speculative_method": "ngram", "block_size": 4},
        {"model": ModelOptions(device="reference")},
        {"block_size": 4, "model": ModelOptions(max_model_len=64), "blocks": 24},
    ],
    ids=str,
)
def test_pieces_give_the_tokens_of_the_whole(
    folder: Path, whole: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """With fewer blocks or places than open requests, too."""
    options = dict(options)
    if (blocks := options.pop("blocks", None)) is not None:
        roomy = Engine(folder, block_size=4)
        options["kv_cache_memory_bytes"] = blocks * roomy.block_bytes
    prompts = _prompts()
    for seed in range(3):
        engine = Engine(folder, **options)
        run_in_pieces(engine, prompts, seed)
        assert {name: engine.results[name].tokens for name in prompts} == whole
        assert engine.blocks_used == 0


def test_an_open_request_waits_with_its_blocks(folder: Path) -> None:
    """While it waits, the engine has nothing to do; nothing is computed twice."""
    engine = Engine(folder, block_size=4)
    engine.add("a", random_prompt(1, 18), greedy(4), open=True)
    engine.run()
    held = engine.blocks_used
    assert held == 5
    assert not engine.results["a"].tokens
    engine.generate(random_prompt(2, 9), greedy(3))
    assert engine.blocks_used == held
    engine.extend("a", [], last=True)
    engine.run()
    assert len(engine.results["a"].tokens) == 4
    assert engine.results["a"].outputs[0].cached_tokens == 0
    assert engine.blocks_used == 0


def test_open_requests_that_wait_give_way(folder: Path) -> None:
    """A place in the batch is not kept from a request that can run, and is taken again."""
    engine = Engine(folder, max_num_seqs=2, block_size=4)
    prompts = {name: random_prompt(index, 20) for index, name in enumerate("ab")}
    for name, prompt in prompts.items():
        engine.add(name, prompt[:12], greedy(4), open=True)
    engine.run()
    other = engine.generate(random_prompt(9, 11), greedy(6))
    assert len(other.tokens) == 6
    for name, prompt in prompts.items():
        engine.extend(name, prompt[12:], last=True)
    engine.run()
    fresh = Engine(folder)
    for name, prompt in prompts.items():
        assert engine.results[name].tokens == fresh.generate(prompt, greedy(4)).tokens


def test_an_open_request_can_be_aborted(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("a", random_prompt(1, 18), greedy(4), open=True)
    engine.run()
    engine.abort("a")
    assert engine.blocks_used == 0
    engine.extend("a", [1], last=True)  # arrives too late
    assert not engine.busy


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(list(range(60)), "more than 63 tokens"), ([100_000], "outside the vocabulary"), ([-1], "outside the vocabulary")],
)
def test_what_cannot_be_appended_ends_the_request(folder: Path, tokens: list[int], text: str) -> None:
    engine = Engine(folder, model=ModelOptions(max_model_len=64))
    engine.add("a", [1, 2, 3, 4], greedy(4), open=True)
    engine.run()
    engine.extend("a", tokens)
    assert text in (engine.results["a"].error or "")
    assert engine.blocks_used == 0


def test_a_complete_prompt_cannot_be_extended(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("a", [1, 2, 3, 4], greedy(30))
    engine.step()
    engine.extend("a", [5])
    assert "already complete" in (engine.results["a"].error or "")
    assert engine.blocks_used == 0


def test_open_requests_generate(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("a", [1, 2], PoolingParams(task="embed"), open=True)
    engine.add("b", [1, 2], greedy(3, prompt_logprobs=1), open=True)
    assert "generates" in (engine.results["a"].error or "")
    assert "prompt_logprobs" in (engine.results["b"].error or "")

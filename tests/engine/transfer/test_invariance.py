"""Tokens do not depend on whether the blocks of a prompt were computed here or in another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.transfer import held_blocks, pair_of
from tests.support.variants import covering

# One of each kind of cache: plain, experts, windows in some layers and in all, latent, keys of long sequences.
CASES = ("llama", "mixtral", "gemma2", "mistral", "deepseek_v3", "phi3-longrope")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"kv_cache_dtype": "int8"},
    {"max_num_batched_tokens": 7, "max_num_seqs": 4, "in_flight": 2},
    {"model": ModelOptions(dtype="bfloat16")},
]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param, num_hidden_layers=2), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("folder", "variant"), covering(CASES, VARIANTS), indirect=["folder"])
def test_tokens_are_those_of_one_engine(folder: Path, variant: dict[str, Any]) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((3, 4, 5, 31, 32, 33, 90))]
    params = greedy(12, logprobs=3)
    one = Engine(folder, block_size=4, **variant)
    for prompt in prompts:
        one.generate(prompt, greedy(1))
    expected = [one.generate(prompt, params) for prompt in prompts]  # behind prefixes in memory
    one.core.close()
    with pair_of(folder, **variant) as pair:
        results = [pair.generate(f"{index}", prompt, params) for index, prompt in enumerate(prompts)]
        for result, alone, prompt in zip(results, expected, prompts, strict=True):
            assert result.error is None
            assert result.tokens == alone.tokens
            assert [output.logprobs for output in result.outputs] == [output.logprobs for output in alone.outputs]
            assert result.outputs[-1].loaded_tokens == (len(prompt) - 1) // 4 * 4
        pair.wait_until_released()
        assert pair.prefiller.blocks_used == pair.decoder.blocks_used == held_blocks(pair.decoder) == 0


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_salts_are_respected(folder: Path) -> None:
    prompt = random_prompt(1, 30)
    with pair_of(folder) as pair:
        result = pair.generate("salted", prompt, greedy(4), cache_salt="a")
        assert result.outputs[-1].loaded_tokens == 28
        stolen = pair.prefill("other", random_prompt(2, 30), cache_salt="b")
        pair.decoder.add("stolen", random_prompt(2, 30), greedy(4), remote=stolen, cache_salt="c")
        pair.run()
        assert "does not keep them any more, or never had them" in (pair.decoder.results["stolen"].error or "")

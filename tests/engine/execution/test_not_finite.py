"""NaN that a model computes for one request ends that request only, and is not found by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import greedy
from tests.support.hf_encoders import assert_close, engine_of, make_encoder, output
from tests.support.models import make_model, save_model
from tests.support.not_finite import (
    BAD,
    GOOD,
    MESSAGE,
    OTHER,
    SAMPLING,
    alone,
    check_one_fails,
    poisoned,
    sampling,
    start,
)


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "cpu") for case in ("llama", "gemma2", "bloom", "gpt_oss", "qwen3_moe", "deepseek_v3", "phimoe")),
        *((case, "reference") for case in ("llama", "gpt_oss")),
    ],
)
def test_other_sequences_are_not_affected(case: str, device: Any, tmp_path: Path) -> None:
    """Nor is one that finds the blocks of the failed one's prefix, or computes its prompt again."""
    folder = save_model(make_model(case, tie_word_embeddings=False), tmp_path)
    good, other, cured = alone(folder, [GOOD, OTHER, BAD], greedy(6))
    engine = start(folder, model=ModelOptions(device=device))
    with poisoned(engine):
        for name, prompt in (("other", OTHER), ("bad", BAD), ("good", GOOD)):
            engine.add(name, prompt, greedy(6))
        engine.run()
        assert engine.results["bad"].error is not None
        assert MESSAGE in engine.results["bad"].error
        assert engine.results["bad"].tokens == []
        assert engine.results["good"].error is None
        assert engine.results["good"].tokens == good
        assert engine.results["other"].tokens == other
        assert (engine.blocks_used, engine.corrupted) == (0, 1)
    assert engine.generate(BAD, greedy(6)).tokens == cured
    assert engine.generate(GOOD, greedy(6)).tokens == good


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", SAMPLING)
def test_every_way_of_sampling(kind: str, in_flight: int, tmp_path: Path) -> None:
    folder, params = save_model(make_model("llama"), tmp_path), sampling(6, kind)
    [good] = alone(folder, [GOOD], params)
    engine = start(folder, in_flight=in_flight)
    check_one_fails(engine, params, good)


def test_a_sequence_that_fails_later(tmp_path: Path) -> None:
    """In a decode step, also with drafts: what it has generated so far was delivered."""
    folder = save_model(make_model("llama"), tmp_path)
    [tokens] = alone(folder, [GOOD], greedy(6))
    for options in ({}, {"speculative_method": "ngram"}):
        engine = start(folder, **options)
        engine.add("r", GOOD, greedy(6))
        while len(engine.results["r"].tokens) < 3:
            engine.step()
        engine.model.embed.weight.data[tokens[2]] = torch.nan
        engine.run()
        assert engine.results["r"].tokens == tokens[:3], options
        assert MESSAGE in (engine.results["r"].error or "")
        assert engine.blocks_used == 0


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_pooling_of_decoders(task: Any, tmp_path: Path) -> None:
    engine = start(save_model(make_model("llama"), tmp_path), model=ModelOptions(task="embed"))
    params = PoolingParams(task=task)
    expected = engine.generate(GOOD, params).pooled
    with poisoned(engine):
        engine.add("bad", BAD, params)
        engine.add("good", GOOD, params)
        engine.run()
    assert MESSAGE in (engine.results["bad"].error or "")
    pooled = engine.results["good"].pooled
    assert expected is not None
    assert pooled is not None
    assert_close(pooled.data, torch.from_numpy(expected.data))
    assert (engine.blocks_used, engine.corrupted) == (0, 1)


def test_pooling_of_encoders(tmp_path: Path) -> None:
    model = make_encoder("bert")
    engine = engine_of(model, tmp_path)
    params = PoolingParams(task="token_embed", use_activation=False)
    with poisoned(engine):
        engine.add("bad", BAD, params)
        engine.add("good", GOOD, params)
        engine.run()
    assert MESSAGE in (engine.results["bad"].error or "")
    pooled = engine.results["good"].pooled
    assert pooled is not None
    assert_close(pooled.data, output(model, GOOD).last_hidden_state[0])
    assert engine.corrupted == 1

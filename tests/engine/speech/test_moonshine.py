"""Moonshine computes what transformers computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.models.errors import ModelError
from quire.multimodal.audio.items import make_item
from tests.support.audio import voice
from tests.support.engine import Engine, greedy
from tests.support.moonshine import CONTEXT, END, START, generated, make_moonshine, save_moonshine
from tests.support.variants import slow_but

LENGTHS = (895, 3000, 16_000, 7001, 40_000)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "encoder_hidden_act": "relu"},
    "all rotated": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    "odd heads": {"hidden_size": 40, "decoder_num_attention_heads": 5, "encoder_num_attention_heads": 5},
    "padded heads": {"pad_head_dim_to_multiple_of": 16},
}


def audio(length: int) -> NDArray[np.float32]:
    return voice(3.0, hertz=100.0 + length % 97)[:length]


def item(engine: Engine, length: int) -> MediaItem:
    return make_item(audio(length), engine.speech)


def until_end(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, eos_token_ids=(END,))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_moonshine()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moonshine(model, tmp_path_factory.mktemp("moonshine"))


@pytest.mark.parametrize(
    ("kind", "device"),
    slow_but(product(KINDS, ["cpu", "reference"]), *((kind, "cpu") for kind in KINDS), ("odd heads", "reference")),
)
def test_tokens_equal_transformers(tmp_path: Path, kind: str, device: str) -> None:
    """All files together, and each alone."""
    model = make_moonshine(**KINDS[kind])
    folder = save_moonshine(model, tmp_path)
    engine = Engine(folder, model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=5, max_num_seqs=5)
    alone = Engine(folder, model=ModelOptions(device=device))
    expected = {length: generated(model, audio(length), 10) for length in LENGTHS}
    assert len({tuple(tokens) for tokens in expected.values()}) > 2, "the outputs say nothing about the inputs"
    for length in LENGTHS:
        engine.add(str(length), [START], until_end(10), items=(item(engine, length),))
    engine.run()
    for length in LENGTHS:
        assert engine.results[str(length)].tokens == expected[length]
        assert alone.generate([START], until_end(10), items=(item(alone, length),)).tokens == expected[length]


def test_a_prompt_in_chunks_and_steps_in_flight(model: Any, folder: Path) -> None:
    """Tokens that are known already are computed in chunks; the rest is the same text."""
    tokens = generated(model, audio(16_000), 30)
    for in_flight, budget in ((1, 3), (2, 64)):
        engine = Engine(folder, in_flight=in_flight, max_num_batched_tokens=budget, max_num_seqs=2, block_size=4)
        engine.add("other", [START], until_end(20), items=(item(engine, 3000),))
        prompt = [START, *tokens[:14]]
        assert engine.generate(prompt, until_end(16), items=(item(engine, 16_000),)).tokens == tokens[14:]
        assert engine.results["other"].tokens == generated(model, audio(3000), 20)


def test_an_item_is_encoded_once(folder: Path) -> None:
    engine = Engine(folder)
    first, second = (engine.generate([START], until_end(8), items=(item(engine, 7001),)).tokens for _ in range(2))
    assert first == second
    assert (engine.items_encoded, engine.items_cached) == (1, 1)


def test_facts_for_the_front_end(folder: Path) -> None:
    engine = Engine(folder)
    info = engine.info
    assert info.tasks == ("transcribe",)
    speech = engine.speech
    assert (speech.kind, speech.features) == ("moonshine", "samples")
    assert (speech.start_token, speech.end_token, speech.timestamp_begin) == (START, END, None)
    assert (speech.languages, speech.aligns_words, speech.translate_token) == ({}, False, None)
    assert (speech.min_columns, speech.num_columns, speech.num_positions) == (895, 480_000, 1248)
    assert speech.max_output_tokens == CONTEXT


def test_there_are_no_times_of_words(folder: Path) -> None:
    engine = Engine(folder)
    refused = engine.generate([START, 5], PoolingParams(task="align"), items=(item(engine, 3000),))
    assert "no task 'align'; its pooling tasks are none" in (refused.error or "")
    short = engine.generate([START], until_end(2), items=(make_item(audio(100), engine.speech),))
    assert len(short.tokens) > 0


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"encoder_num_attention_heads": 2}, "different numbers of heads"),
        ({"decoder_num_key_value_heads": 2}, "different numbers of heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"encoder_num_hidden_layers": 0}, "encoder has no layers"),
        ({"decoder_hidden_act": "unheard"}, "activation 'unheard'"),
    ],
)
def test_folders_that_cannot_be_loaded(folder: Path, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Engine(folder, model=ModelOptions(hf_overrides=overrides))

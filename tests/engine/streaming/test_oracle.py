"""Voxtral Realtime computes what transformers computes, of audio that is known from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy
from tests.support.streaming_models import (
    PAD,
    START,
    audio_of,
    expected_tokens,
    features,
    make_streaming_model,
    save_streaming_model,
    streaming_info,
)

# Prompt tokens and frames: within the windows of 24 tokens and 18 / 4 frames, and far beyond.
CASES = [(8, 60), (8, 9), (1, 2), (5, 23), (40, 110), (12, 90)]
ALL = greedy(1 << 20)


def prompt(length: int) -> list[int]:
    return [START, *[PAD] * (length - 1)]


@pytest.fixture(scope="module")
def expected(streaming_model: Any) -> list[list[int]]:
    """What transformers generates in each case."""
    return [
        expected_tokens(streaming_model, prompt(tokens), features(index, frames))
        for index, (tokens, frames) in enumerate(CASES)
    ]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_greedy_tokens_equal_transformers(expected: list[list[int]], streaming_folder: Path, device: str) -> None:
    """All together in small chunks, then each alone."""
    options = ModelOptions(device=device)
    engine = Engine(streaming_folder, model=options, block_size=4, max_num_batched_tokens=11, max_num_seqs=6)
    for index, (tokens, frames) in enumerate(CASES):
        engine.add(str(index), prompt(tokens), ALL, items=(audio_of(features(index, frames)),))
    engine.run()
    assert [engine.results[str(index)].tokens for index in range(len(CASES))] == expected
    assert [len(tokens) for tokens in expected] == [frames - tokens for tokens, frames in CASES]
    assert len(set(expected[0])) > 10, "the tokens say nothing about the audio"
    alone = Engine(streaming_folder, model=options)
    for index, (tokens, frames) in enumerate(CASES):
        result = alone.generate(prompt(tokens), ALL, items=(audio_of(features(index, frames)),))
        assert result.tokens == expected[index]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("delay", [1, 12])
def test_the_delay_is_part_of_the_model(tmp_path: Path, delay: int) -> None:
    """It changes the norms, so other tokens come of the same weights."""
    texts = []
    for delayed in (delay, 3):
        model = make_streaming_model(default_num_delay_tokens=delayed)
        folder = save_streaming_model(model, tmp_path / str(delayed))
        audio = features(0, 80)
        engine = Engine(folder)
        assert streaming_info(folder).delay_frames == delayed
        texts.append(engine.generate(prompt(4), ALL, items=(audio_of(audio),)).tokens)
        assert texts[-1] == expected_tokens(model, prompt(4), audio)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ({"sliding_window": None}, {}),
        ({"num_key_value_heads": 4}, {"tie_word_embeddings": False}),
        ({}, {"downsample_factor": 2, "audio_length_per_tok": 4}),
    ],
    ids=["all of the decoder's positions", "a head of its own", "shorter frames"],
)
def test_other_shapes(tmp_path: Path, text: dict[str, Any], changes: dict[str, Any]) -> None:
    model = make_streaming_model(text=text, **changes)
    folder = save_streaming_model(model, tmp_path)
    columns = model.config.audio_length_per_tok
    audio = features(5, 100)[:, : 90 * columns]
    tokens = Engine(folder, block_size=8).generate(prompt(6), ALL, items=(audio_of(audio),)).tokens
    assert tokens == expected_tokens(model, prompt(6), audio)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_low_precision_stays_close(streaming_folder: Path, quantization: str) -> None:
    """Log-probabilities of the first token in bfloat16 and int8 are near those in float32."""
    exact = Engine(streaming_folder)
    rough = Engine(streaming_folder, model=ModelOptions(dtype="bfloat16", quantization=quantization))
    probs = []
    for engine in (exact, rough):
        audio = audio_of(features(1, 40))
        outputs = engine.generate(prompt(8), greedy(1, logprobs=300), items=(audio,)).outputs
        assert outputs[0].logprobs is not None
        entry = outputs[0].logprobs[0]
        row = torch.zeros(300)
        row[entry.token_ids] = torch.tensor(entry.logprobs).exp()
        probs.append(row)
    assert 0.5 * float((probs[0] - probs[1]).abs().sum()) < 0.25


def test_generation_stops_at_an_end_token(streaming_model: Any, streaming_folder: Path) -> None:
    audio = features(0, 60)
    tokens = expected_tokens(streaming_model, prompt(8), audio)
    engine = Engine(streaming_folder)
    result = engine.generate(prompt(8), greedy(1000, eos_token_ids=(tokens[12],)), items=(audio_of(audio),))
    assert result.tokens == tokens[: tokens.index(tokens[12]) + 1]
    assert result.finish_reason == "stop"
    limited = engine.generate(prompt(8), greedy(5), items=(audio_of(audio),))
    assert (limited.tokens, limited.finish_reason) == (tokens[:5], "length")
    assert engine.blocks_used == 0

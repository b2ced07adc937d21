"""Transducers compute what transformers computes, of whole audio and of audio that arrives in chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.inputs import Span
from quire.engine.models.networks.transducer import Piece
from tests.support.engine import Engine, greedy, load
from tests.support.transducer_models import (
    BLANK,
    CHUNK,
    FACTOR,
    LOOKAHEAD,
    MAX_SYMBOLS,
    Features,
    audio_of,
    expected_live_tokens,
    expected_tokens,
    features,
    make_transducer,
    offline,
    save_transducer,
    states_of_one_sequence,
    transducer_info,
)

# Columns: within a frame, within the first chunk, around the ends of frames and chunks, far beyond the window.
CASES = [1, 2, 7, 8, 9, 10, 24, 25, 26, 57, 58, 150, 400, 1003]
ALL = greedy(1 << 20)
ATTEND = VarlenAttention(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_tokens_equal_transformers(transducer: Any, transducer_folder: Path, device: str) -> None:
    """All together, then each alone."""
    options = ModelOptions(device=device)
    engine = Engine(transducer_folder, model=options, max_num_seqs=6)
    expected = [expected_tokens(transducer, features(index, columns)) for index, columns in enumerate(CASES)]
    for index, columns in enumerate(CASES):
        engine.add(str(index), [], ALL, items=(audio_of(features(index, columns)),))
    engine.run()
    assert [engine.results[str(index)].tokens for index in range(len(CASES))] == expected
    frames = [-(-(columns - 1) // FACTOR) + 1 for columns in CASES]
    assert [sum(token == BLANK for token in tokens) for tokens in expected] <= frames
    assert len(set(expected[-1])) > 8, "the tokens say nothing about the audio"
    assert any(_longest_run(tokens) >= MAX_SYMBOLS for tokens in expected), "no frame has as many tokens as it may have"
    alone = Engine(transducer_folder, model=options)
    for index, columns in enumerate(CASES):
        result = alone.generate([], ALL, items=(audio_of(features(index, columns)),))
        assert result.tokens == expected[index]
        assert result.finish_reason == "stop"


def _longest_run(tokens: list[int]) -> int:
    """Most tokens in a row without a blank."""
    runs = "".join("b" if token == BLANK else "t" for token in tokens).split("b")
    return max(map(len, runs))


@pytest.mark.parametrize("chunks", [1, 2, 30])
def test_tokens_of_live_audio_equal_transformers(transducer: Any, transducer_folder: Path, chunks: int) -> None:
    """transformers reads whole chunks only; each arrives by itself."""
    audio = features(chunks, 1 + FACTOR * (CHUNK * chunks - 1))
    engine = Engine(transducer_folder)
    engine.add("r", [], ALL, open=True)
    at, size = 0, 1 + FACTOR * LOOKAHEAD
    while at < audio.shape[1]:
        engine.extend("r", [], items=(audio_of(audio[:, at : at + size]),))
        engine.run()
        at, size = at + size, FACTOR * CHUNK
    engine.extend("r", [], last=True)
    engine.run()
    assert engine.results["r"].tokens == expected_live_tokens(transducer, audio) == expected_tokens(transducer, audio)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "each frame by itself": ({"default_num_lookahead_tokens": 0}, {}),
    "long chunks": ({"default_num_lookahead_tokens": 13, "sliding_window": 43}, {}),
    "a window that is not whole chunks": ({"sliding_window": 11}, {}),
    "no earlier chunks": ({"sliding_window": 2}, {}),
    "no biases": ({"attention_bias": False, "convolution_bias": False, "scale_input": False}, {}),
    "shorter frames": ({"subsampling_factor": 4, "num_mel_bins": 18}, {}),
    "other kernels": ({"subsampling_conv_kernel_size": 5, "conv_kernel_size": 8}, {}),
    "one layer of the LSTM": ({}, {"num_decoder_layers": 1, "hidden_act": "silu", "max_symbols_per_step": 1}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(tmp_path: Path, name: str) -> None:
    encoder, changes = SHAPES[name]
    model = make_transducer(encoder=encoder, **changes)
    folder = save_transducer(model, tmp_path)
    audio = features(5, 500, model.config.encoder_config.num_mel_bins)
    result = Engine(folder).generate([], ALL, items=(audio_of(audio),))
    assert result.tokens == expected_tokens(model, audio), result.error


@pytest.mark.parametrize("seed", range(8))
def test_random_configs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    encoder = {
        "hidden_size": rng.choice([16, 24, 32]),
        "num_attention_heads": rng.choice([1, 2, 4]),
        "num_hidden_layers": rng.randint(1, 3),
        "intermediate_size": rng.choice([16, 40]),
        "subsampling_conv_channels": rng.choice([2, 5, 8]),
        "conv_kernel_size": rng.randint(1, 9),
        "num_mel_bins": rng.choice([8, 13, 16, 20]),
        "sliding_window": rng.randint(1, 20),
        "default_num_lookahead_tokens": rng.randint(0, 7),
        "subsampling_factor": rng.choice([2, 4, 8, 16]),
        "subsampling_conv_kernel_size": rng.randint(2, 5),
        "scale_input": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "convolution_bias": rng.random() < 0.5,
        "hidden_act": rng.choice(["silu", "gelu", "relu"]),
    }
    changes = {
        "num_decoder_layers": rng.randint(1, 3),
        "max_symbols_per_step": rng.randint(1, 5),
        "hidden_act": rng.choice(["relu", "tanh", "silu"]),
        "decoder_hidden_size": rng.choice([8, 24]),
    }
    model = make_transducer(seed=seed, encoder=encoder, **changes)
    folder = save_transducer(model, tmp_path)
    (folder / "processor_config.json").unlink()  # it lists the lookaheads of the training
    engine = Engine(folder)
    for columns in (1, 5, rng.randint(10, 600)):
        audio = features(seed, columns, model.config.encoder_config.num_mel_bins)
        assert engine.generate([], ALL, items=(audio_of(audio),)).tokens == expected_tokens(model, audio), encoder


def pieces_of(audio: Features, chunks: int) -> list[tuple[torch.Tensor, bool]]:
    """Pieces of so many chunks, and whether each is the last."""
    pieces, at, size = [], 0, FACTOR * (CHUNK * chunks - 1) + 1
    while at < audio.shape[1]:
        pieces.append((torch.from_numpy(audio[:, at : at + size].copy()), at + size >= audio.shape[1]))
        at, size = at + size, FACTOR * CHUNK * chunks
    return pieces


@pytest.mark.parametrize("chunks", [1, 3, 100])
@pytest.mark.parametrize("columns", [1, 30, 57, 301, 700])
def test_incremental_encoding_equals_that_of_the_whole(
    transducer: Any, transducer_folder: Path, columns: int, chunks: int
) -> None:
    model, audio = load(transducer_folder).model, features(columns, columns)
    encoded, start, caches = [], 0, states_of_one_sequence(model)
    with torch.inference_mode():
        for piece, last in pieces_of(audio, chunks):
            states = caches.of_step([Span(0, 0, start, 0, False, False)])
            encoded += model.encode([Piece(piece, start, last)], states, ATTEND)
            states.commit()
            start += len(encoded[-1])
        whole = transducer.get_audio_features(**offline(audio), num_lookahead_tokens=LOOKAHEAD)
    expected = whole.pooler_output[0, : int(whole.attention_mask.sum())]
    torch.testing.assert_close(torch.cat(encoded), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_low_precision_stays_close(transducer_folder: Path, quantization: str) -> None:
    """Encodings in bfloat16 and int8 are near those in float32."""
    piece = torch.from_numpy(features(1, 400))
    pieces = []
    for options in ({}, {"dtype": "bfloat16", "quantization": quantization}):
        model = load(transducer_folder, **options).model
        with torch.inference_mode():
            like = model.encoder.sample
            states = states_of_one_sequence(model).of_step([Span(0, 0, 0, 0, False, False)])
            (encoded,) = model.encode([Piece(piece.to(like.dtype), 0, last=True)], states, ATTEND)
        pieces.append(encoded.float())
    exact, rough = pieces
    assert float((exact - rough).norm() / exact.norm()) < 0.1


def test_bfloat16_engine_runs(transducer_folder: Path) -> None:
    """Without and with chunks of other sequences, whose texts are near those in float32."""
    engine = Engine(transducer_folder, model=ModelOptions(dtype="bfloat16"))
    for index in range(3):
        engine.add(str(index), [], ALL, items=(audio_of(features(index, 200)),))
    engine.run()
    assert all(result.finish_reason == "stop" and result.tokens for result in engine.results.values())


def test_the_token_limit_counts_tokens_that_are_not_blank(transducer: Any, transducer_folder: Path) -> None:
    audio = features(0, 400)
    tokens = expected_tokens(transducer, audio)
    result = Engine(transducer_folder).generate([], greedy(5), items=(audio_of(audio),))
    fifth = [index for index, token in enumerate(tokens) if token != BLANK][4]
    assert (result.tokens, result.finish_reason) == (tokens[: fifth + 1], "length")


def test_log_probabilities_are_those_of_the_tokens(transducer: Any, transducer_folder: Path) -> None:
    audio = features(3, 120)
    result = Engine(transducer_folder).generate([], greedy(1 << 20, logprobs=0), items=(audio_of(audio),))
    entries = [entry for output in result.outputs for entry in output.logprobs or ()]
    assert [entry.token_ids for entry in entries] == [[token] for token in result.tokens]
    with torch.inference_mode():
        encoded = transducer.get_audio_features(**offline(audio), num_lookahead_tokens=LOOKAHEAD).pooler_output
        logits = transducer.joint(transducer.decoder(torch.tensor([[BLANK]])), encoded[:, :1])
    assert entries[0].logprobs[0] == pytest.approx(float(logits[0, 0].log_softmax(-1).max()), abs=1e-4)
    assert all(entry.logprobs[0] <= 0 for entry in entries)


def test_the_lookahead_is_chosen_by_overrides(transducer: Any, transducer_folder: Path) -> None:
    audio, texts = features(2, 400), []
    for lookahead in (0, 1, LOOKAHEAD):
        options = ModelOptions(hf_overrides={"encoder_config": {"default_num_lookahead_tokens": lookahead}})
        engine = Engine(transducer_folder, model=options)
        with torch.inference_mode():
            out = transducer.generate(**offline(audio), num_lookahead_tokens=lookahead, max_new_tokens=1 << 20)
        texts.append(engine.generate([], ALL, items=(audio_of(audio),)).tokens)
        assert texts[-1] == out.sequences[0, 1:].tolist()
    assert texts[0] != texts[2]
    assert transducer_info(transducer_folder).chunk_frames == CHUNK


def test_audio_for_which_the_model_computes_nan(transducer: Any, transducer_folder: Path) -> None:
    """It ends with an error; the other sequence of the step does not."""
    engine = Engine(transducer_folder)
    engine.add("bad", [], ALL, items=(audio_of(np.full_like(features(1, 57), 3e38)),))
    engine.add("good", [], ALL, items=(audio_of(features(0, 57)),))
    engine.run()
    assert "not a finite number" in (engine.results["bad"].error or "")
    assert engine.corrupted == 1
    assert engine.results["good"].tokens == expected_tokens(transducer, features(0, 57))

"""Features of audio that arrives in pieces are those of transformers' extractor, for all of it at once."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from transformers import NemotronAsrStreamingFeatureExtractor, VoxtralRealtimeFeatureExtractor

from quire.engine.client.streaming import DelayedStreamsInfo, TransducerInfo
from quire.multimodal.audio.frames import ColumnMaker, FrameMaker, frames_of
from tests.support.audio import voice

INFO = DelayedStreamsInfo(
    sample_rate=16_000,
    num_mel_bins=128,
    columns_per_frame=8,
    floor=-6.5,
    delay_frames=6,
    left_frames=32,
    right_frames=17,
    start_token=1,
    pad_token=32,
)
TRANSDUCER = TransducerInfo(
    sample_rate=16_000, num_mel_bins=80, columns_per_frame=8, chunk_frames=14, blank_token=0, max_symbols=10
)
FRAME = 1280


@pytest.mark.parametrize("samples", [1, 1279, 1280, 1281, 20_000, 41_111])
def test_features_are_those_of_transformers(samples: int) -> None:
    """With the silence that Mistral's tokenizer puts around the audio."""
    audio = voice(3.0)[:samples]
    frames = 32 + -(-samples // FRAME) + 17
    padded = np.pad(audio, (32 * FRAME, frames * FRAME - 32 * FRAME - samples))
    extract = VoxtralRealtimeFeatureExtractor()
    expected = extract(padded, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    features = frames_of(audio, INFO)
    assert features.shape == expected.shape == (128, 8 * frames)
    np.testing.assert_allclose(features, expected, atol=2e-4)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_give_the_same_features(seed: int) -> None:
    rng, audio = random.Random(seed), voice(2.7)
    maker, parts, at = FrameMaker(INFO), [], 0
    while at < len(audio):
        size = rng.choice([0, 1, 160, rng.randint(1, 900), rng.randint(1, 9000)])
        parts.append(maker.push(audio[at : at + size]))
        assert parts[-1].shape[1] % 8 == 0
        at += size
    assert maker.frames == -(-len(audio) // FRAME)
    np.testing.assert_array_equal(np.concatenate([*parts, maker.finish()], 1), frames_of(audio, INFO))


def test_frames_are_complete_as_soon_as_they_can_be() -> None:
    """40 samples behind a frame, which its last column reaches, are enough; the silence needs some of the audio."""
    maker = FrameMaker(INFO)
    assert maker.push(np.zeros(39, np.float32)).shape[1] == 31 * 8
    assert maker.push(np.zeros(1, np.float32)).shape[1] == 8
    assert maker.push(np.zeros(FRAME - 1, np.float32)).shape[1] == 0
    assert maker.push(np.zeros(1, np.float32)).shape[1] == 8


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("samples", [160, 161, 319, 1280, 20_000, 41_111])
def test_features_of_transducers_are_those_of_transformers(samples: int, bfloat16: bool) -> None:
    """Without the last column, which transformers masks."""
    audio = voice(3.0)[:samples]
    extract = NemotronAsrStreamingFeatureExtractor(mel_filters_dtype="bfloat16" if bfloat16 else "float32")
    extracted = extract(audio, sampling_rate=16_000)
    expected = extracted["input_features"][0, : int(extracted["attention_mask"].sum())].numpy().T
    features = frames_of(audio, msgspec.structs.replace(TRANSDUCER, bfloat16_filters=bfloat16))
    assert features.shape == expected.shape == (80, samples // 160)
    np.testing.assert_allclose(features, expected, atol=2e-3)


@pytest.mark.parametrize("samples", [0, 1, 159])
def test_very_short_audio_has_one_column(samples: int) -> None:
    assert frames_of(voice(1.0)[:samples], TRANSDUCER).shape == (80, 1)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_give_the_same_columns(seed: int) -> None:
    rng, audio = random.Random(seed), voice(2.7)
    maker, parts, at = ColumnMaker(TRANSDUCER), [], 0
    while at < len(audio):
        size = rng.choice([0, 1, 160, rng.randint(1, 900), rng.randint(1, 9000)])
        parts.append(maker.push(audio[at : at + size]))
        at += size
    assert maker.frames == -(-len(audio) // FRAME)
    np.testing.assert_array_equal(np.concatenate([*parts, maker.finish()], 1), frames_of(audio, TRANSDUCER))


def test_columns_are_complete_as_soon_as_they_can_be() -> None:
    """200 samples behind their centers are enough."""
    maker = ColumnMaker(TRANSDUCER)
    assert maker.push(np.zeros(199, np.float32)).shape[1] == 0
    assert maker.push(np.zeros(1, np.float32)).shape[1] == 1
    assert maker.push(np.zeros(320, np.float32)).shape[1] == 2
    assert maker.finish().shape[1] == 0

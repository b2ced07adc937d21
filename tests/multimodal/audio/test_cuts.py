"""Long audio is cut in pauses, and nothing of it is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.multimodal.audio.cuts import Window, cut, cut_between, last_pause
from quire.multimodal.audio.features import SAMPLE_RATE
from tests.support.audio import Samples, tone


def with_pauses(seconds: float, *pauses: float) -> Samples:
    """A tone with a pause of 0.2 s at each of these times."""
    samples = tone(seconds)[:, 0].copy()
    for pause in pauses:
        start = round(pause * SAMPLE_RATE)
        samples[start : start + SAMPLE_RATE // 5] = 0
    return samples


def test_windows_end_in_the_middle_of_a_pause() -> None:
    windows = cut(with_pauses(70.0, 27.0, 55.5), 30.0)
    assert [round(window.offset, 1) for window in windows] == [0.0, 27.1, 55.6]
    assert windows[-1].end == 70 * SAMPLE_RATE


def test_short_audio_is_one_window_and_no_audio_is_none() -> None:
    assert cut(tone(30.0)[:, 0], 30.0) == [Window(0, 30 * SAMPLE_RATE)]
    assert cut(np.zeros(0, np.float32), 30.0) == []


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 9 * SAMPLE_RATE), seconds=st.floats(0.3, 3.0), seed=st.integers(0, 100))
def test_every_sample_is_in_exactly_one_window(length: int, seconds: float, seed: int) -> None:
    samples = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    windows = cut(samples, seconds)
    assert windows[0].start == 0
    assert windows[-1].end == length
    assert all(window.end == two.start for window, two in pairwise(windows))
    assert all(0 < window.end - window.start <= round(seconds * SAMPLE_RATE) for window in windows)


def test_speech_is_grouped_into_windows_and_long_speech_is_cut() -> None:
    second = SAMPLE_RATE
    samples = with_pauses(100.0, 75.0)
    speech = [(0, 5 * second), (8 * second, 20 * second), (28 * second, 33 * second), (50 * second, 100 * second)]
    windows = cut_between(samples, speech, 30.0)
    assert windows[:2] == [Window(0, 20 * second), Window(28 * second, 33 * second)]
    assert windows[2].offset == 50.0
    assert 75.0 < windows[3].offset < 75.2
    assert windows[-1].end == 100 * second
    assert all(window.seconds <= 30 for window in windows)


def test_a_silence_within_a_word_is_no_pause() -> None:
    """The closure of a "p" may be quieter than the hiss between two sentences."""
    samples = with_pauses(40.0)
    samples[29 * SAMPLE_RATE :][: SAMPLE_RATE // 10] = 0
    pause = slice(18 * SAMPLE_RATE, round(18.5 * SAMPLE_RATE))
    samples[pause] = 0.001 * np.random.default_rng(0).standard_normal(SAMPLE_RATE // 2)
    assert 18.0 < cut(samples, 30.0)[1].offset < 18.5


def test_of_several_pauses_the_last_is_taken_although_another_is_quieter() -> None:
    samples = with_pauses(40.0)
    hiss = np.random.default_rng(0).standard_normal(SAMPLE_RATE // 2).astype(np.float32)
    for second, loudness in ((16, 0.0), (20, 0.0003), (24, 0.001)):
        samples[second * SAMPLE_RATE :][: len(hiss)] = loudness * hiss
    assert 24.0 < cut(samples, 30.0)[1].offset < 24.5


def test_a_window_begins_shortly_before_speech() -> None:
    samples = with_pauses(40.0)
    samples[20 * SAMPLE_RATE : 28 * SAMPLE_RATE] = 0
    assert 27.5 < cut(samples, 30.0)[1].offset < 27.9


def test_silence_has_a_place_for_a_cut() -> None:
    assert last_pause(np.zeros(SAMPLE_RATE, np.float32)) > 0.5 * SAMPLE_RATE
    assert last_pause(np.zeros(5, np.float32)) == 5

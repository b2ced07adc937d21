"""Long audio is cut at its quietest places, and nothing of it is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.multimodal.audio.cuts import Window, cut, cut_between, quietest
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
    assert all(one.end == two.start for one, two in pairwise(windows))
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


def test_of_equally_quiet_places_the_last_is_taken() -> None:
    assert quietest(np.zeros(SAMPLE_RATE, np.float32)) > 0.9 * SAMPLE_RATE
    assert quietest(np.zeros(5, np.float32)) == 5

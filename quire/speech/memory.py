"""How much memory a transcription takes."""

from __future__ import annotations

from quire.multimodal.audio.features import SAMPLE_RATE
from quire.speech.running import MOST

_FEATURES = 2  # of a window: here and in the engine. They are not larger than its samples, padded to a whole window
_MORE_HEARINGS = 3  # windows more of an utterance that is heard again: two of features, and the audio that was moved
_SAMPLE = 4  # bytes


def kept_bytes(samples: int, window_seconds: float) -> int:
    """Bytes of audio and of its features while it is transcribed; see `feature_bytes`."""
    return _SAMPLE * samples + feature_bytes(samples, window_seconds)


def feature_bytes(samples: int, window_seconds: float, *, rehears: bool = False) -> int:
    """Bytes of the features of audio while it is transcribed.

    Args:
        samples: at 16 kHz.
        window_seconds: longest audio of one request to the engine.
        rehears: doubtful audio is heard again; see `TranscriptionOptions`.
    """
    windows = _FEATURES + (_MORE_HEARINGS if rehears else 0)
    window = round(window_seconds * SAMPLE_RATE)
    return _SAMPLE * windows * min(max(samples, window), MOST * window)

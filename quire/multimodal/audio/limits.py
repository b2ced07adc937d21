"""Limits of audio files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Limits of an audio file.

    Attributes:
        size: size of the file in bytes.
        seconds: duration of the audio in seconds.
        decoded_size: bytes of all channels, decoded to float32 at the file's sample rate. They are never held at once.
        video_size: size of a video in bytes, whose sound is decoded.
    """

    size: int
    seconds: float
    decoded_size: int
    video_size: int = 0

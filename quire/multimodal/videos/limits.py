"""Limits of videos."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of a video: bytes of its file, pixels of a frame, and frames that are read."""

    size: int
    pixels: int
    frames: int

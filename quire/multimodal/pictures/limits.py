"""Limits of picture files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits of a picture file: its bytes, and its pixels."""

    size: int
    pixels: int

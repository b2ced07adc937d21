"""Pictures for tests: drawn ones, and their files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def drawn(height: int, width: int, *, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of waves and noise, so that every resizing and shift changes it."""
    rng = np.random.default_rng(seed)
    rows, columns = np.indices((height, width))
    waves = np.stack([np.sin(rows / (3 + index) + columns / (7 - index)) for index in range(len(mode))], axis=-1)
    values = 127 + 80 * waves + rng.normal(0, 20, waves.shape)
    pixels = np.clip(values, 0, 255).astype(np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()

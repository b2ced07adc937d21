"""Pictures for tests: drawn ones, their files, and what becomes of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from quire.multimodal.picture_jobs import PictureFile
from quire.multimodal.picture_reader import PictureReader, RequestPicture
from quire.multimodal.preparation import prepare_together


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


async def prepared(
    reader: PictureReader, files: Sequence[PictureFile], *, tenant: str = "", **options: Any
) -> list[RequestPicture]:
    """The pictures and videos of a prompt without other media."""
    preparation = await reader.plan(files, tenant=tenant, **options)
    (pictures,) = await prepare_together(reader.memory, [preparation], tenant)
    return list(pictures)

"""Resizing has the bits of Pillow, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from quire.engine.client.pictures import Filter
from quire.multimodal.pictures import resize
from quire.multimodal.pictures.resize import resized

SIZES = ((16, 16), (17, 33), (64, 48), (100, 37), (37, 150), (151, 219), (3, 40))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos", "box"])
def test_bits_are_those_of_pillow(resample: Filter, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(resize, "compiled", None)
    elif resize.compiled is None:
        pytest.skip("not compiled")
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        for new_height, new_width in SIZES:
            image = Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling[resample.upper()])
            ours = resized(pixels, new_height, new_width, resample)
            np.testing.assert_array_equal(ours, np.asarray(image), f"{height}x{width} to {new_height}x{new_width}")


def test_extreme_values_do_not_overflow() -> None:
    """Lanczos' weights overshoot at edges of black and white."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[::2, ::3] = 255
    image = Image.fromarray(pixels).resize((200, 170), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(resized(pixels, 170, 200, "lanczos"), np.asarray(image))


def test_a_part_of_a_picture_is_resized_like_a_picture() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (90, 90, 3), np.uint8)
    part = pixels[10:70, 5:65]
    np.testing.assert_array_equal(resized(part, 30, 40, "bicubic"), resized(part.copy(), 30, 40, "bicubic"))


def test_no_buffer_is_overrun() -> None:
    if resize.compiled is None:
        pytest.skip("not compiled")
    pixels = np.zeros((20, 30, 3), np.uint8)
    for size, new in (((20, 30), (21, 31)), ((21, 30), (21, 40)), ((20, 15), (20, 40)), ((20, 30), (20, 15))):
        with pytest.raises(ValueError, match="two sizes that differ in one edge"):
            resize.compiled.resize(pixels, *size, np.zeros((21, 31, 3), np.uint8), *new, 1)

"""Resizing has the bits of Pillow, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from quire.engine.client.pictures import Filter
from quire.multimodal.pictures import resize
from quire.multimodal.pictures.resize import resized, resized_bands

SIZES = ((16, 16), (17, 33), (64, 48), (100, 37), (37, 150), (151, 219), (3, 40))


@pytest.fixture(params=[0, 1, 2, 4], ids=["by Pillow", "compiled", "pairs", "quads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways to resize; on processors that have no instruction for quads or pairs, the last ones are the same."""
    if not request.param:
        monkeypatch.setattr(resize, "compiled", None)
    elif resize.compiled is None:
        pytest.skip("not compiled")
    monkeypatch.setattr(resize, "most_products", request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos", "box"])
def test_bits_are_those_of_pillow(resample: Filter) -> None:
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        for new_height, new_width in SIZES:
            image = Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling[resample.upper()])
            ours = resized(pixels, new_height, new_width, resample)
            np.testing.assert_array_equal(ours, np.asarray(image), f"{height}x{width} to {new_height}x{new_width}")


@pytest.mark.usefixtures("way")
def test_a_large_picture_is_resized_in_bands() -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (300, 40, 3), np.uint8)
    for height, width in ((700, 90), (150, 20), (301, 40)):
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(resized(pixels, height, width, "lanczos"), np.asarray(image))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [(300, 70), (300, 40), (90, 70), (20, 39)])
def test_bands_together_are_the_resized_picture(size: tuple[int, int]) -> None:
    """Enlarged, one edge unchanged, and with the height first."""
    pixels = np.random.default_rng(3).integers(0, 256, (90, 40, 3), np.uint8)
    bands = [band.copy() for band in resized_bands(pixels, *size, "bicubic", 64)]
    assert {len(band) for band in bands[:-1]} <= {64}
    np.testing.assert_array_equal(np.concatenate(bands), resized(pixels, *size, "bicubic"))


@pytest.mark.usefixtures("way")
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
    for size, new, rows, first in (
        ((20, 31), (40, 30), 40, 0),
        ((20, 30), (40, 31), 40, 0),
        ((20, 30), (40, 30), 40, 1),
        ((20, 30), (40, 30), 20, 21),
        ((20, 30), (40, 30), 20, -1),
        ((20, 30), (40, 15), 40, 0),
        ((20, 30), (20, 30), 10, 0),
        ((20, 30), (40, 30), 0, 0),
    ):
        with pytest.raises(ValueError, match="two sizes of 16 pixels or more"):
            resize.compiled.resize(pixels, *size, np.zeros((rows, 30, 3), np.uint8), *new, 1, first, 4)

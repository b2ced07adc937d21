"""Resizes pictures as Pillow does, to the bit; where it was compiled, by code that takes a tenth of Pillow's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from PIL import Image

from quire.engine.client.pictures import Filter
from quire.engine.client.protocol import PixelArray

try:
    from quire.multimodal.pictures import _resample
except ImportError:  # built without a compiler
    _resample = None  # type: ignore[assignment]

compiled = _resample
most_products = 4  # that one instruction sums: 4 (AVX-512 VNNI), 2 (AVX2) or 1; fewer where the processor has no such

_COMPILED: Mapping[Filter, int] = {"bilinear": 0, "bicubic": 1, "lanczos": 2}  # by the numbers of `_resample`
_SMALLEST = 16  # edge that it resizes
_ROWS_FIRST_BELOW = 2  # see `changes_height_first`


def changes_height_first(size: tuple[int, int], new_size: tuple[int, int]) -> bool:
    """Whether the height is changed before the width: if it loses more than twice as many pixels as the width.

    So does Pillow 13, and it is done here whatever Pillow does, so that the bits do not depend on its version.
    """
    return 0 < size[0] - new_size[0] > _ROWS_FIRST_BELOW * (size[1] - new_size[1])


def resized(pixels: PixelArray, height: int, width: int, resample: Filter) -> PixelArray:
    """Resize a picture, if it has another size.

    Args:
        pixels: (height, width, 3), of 8 bits.
        height, width: the new size.
        resample: the filter.
    """
    size = pixels.shape[:2]
    if changes_height_first(size, (height, width)):
        pixels = _resized(pixels, height, size[1], resample)
    return _resized(pixels, height, width, resample)


def resized_bands(pixels: PixelArray, height: int, width: int, resample: Filter, rows: int) -> Iterator[PixelArray]:
    """Resize a picture in bands of rows, so that the whole of it is never in memory.

    Args:
        pixels: (height, width, 3), of 8 bits.
        height, width: the new size.
        resample: the filter.
        rows: of a band.

    Yields:
        The pixels of each band, which are valid until the next one.
    """
    size = pixels.shape[:2]
    if (
        size[0] == height
        or changes_height_first(size, (height, width))
        or not _is_compiled(size, height, width, resample)
    ):
        pixels = resized(pixels, height, width, resample)
        for first in range(0, height, rows):
            yield pixels[first : first + rows]
        return
    pixels = np.ascontiguousarray(pixels)
    band = np.empty((rows, width, 3), np.uint8)
    for first in range(0, height, rows):
        band = band[: height - first]
        _resize(pixels, band, height, resample, first)
        yield band


def _resized(pixels: PixelArray, height: int, width: int, resample: Filter) -> PixelArray:
    """A picture of which the width is changed first."""
    size = pixels.shape[:2]
    if size == (height, width):
        return pixels
    if not _is_compiled(size, height, width, resample):
        for edges in ((size[0], width), (height, width)):  # one by one, in this order
            image = Image.fromarray(np.ascontiguousarray(pixels))
            pixels = np.asarray(image.resize(edges[::-1], Image.Resampling[resample.upper()]))
        return pixels
    new = np.empty((height, width, 3), np.uint8)
    _resize(np.ascontiguousarray(pixels), new, height, resample, 0)
    return new


def _is_compiled(size: tuple[int, ...], height: int, width: int, resample: Filter) -> bool:
    return compiled is not None and resample in _COMPILED and min(*size, height, width) >= _SMALLEST


def _resize(pixels: PixelArray, band: PixelArray, height: int, resample: Filter, first: int) -> None:
    assert compiled is not None
    old_height, old_width, _ = pixels.shape
    kernel = _COMPILED[resample]
    compiled.resize(pixels, old_height, old_width, band, height, band.shape[1], kernel, first, most_products)

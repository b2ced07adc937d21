"""Resizes pictures as Pillow does, to the bit; where it was compiled, by code that takes a fifth of Pillow's time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image

from quire.engine.client.pictures import Filter
from quire.engine.client.protocol import PixelArray

try:
    from quire.multimodal.pictures import _resample
except ImportError:  # built without a compiler
    _resample = None  # type: ignore[assignment]

compiled = _resample

_COMPILED: Mapping[Filter, int] = {"bilinear": 0, "bicubic": 1, "lanczos": 2}  # by the numbers of `_resample`
_SMALLEST = 16  # edge that it resizes
_ROWS_FIRST_BELOW = 2  # see `rows_first`


def resized(pixels: PixelArray, height: int, width: int, resample: Filter) -> PixelArray:
    """Resize a picture, if it has another size.

    Its width is changed, then its height, or the other way round; see `rows_first`.

    Args:
        pixels: (height, width, 3), of 8 bits.
        height, width: the new size.
        resample: the filter.
    """
    sizes = [(pixels.shape[0], width), (height, width)]
    if rows_first((pixels.shape[0], pixels.shape[1]), (height, width)):
        sizes[0] = height, pixels.shape[1]
    for size in sizes:
        if size != pixels.shape[:2]:
            pixels = _one_edge(pixels, *size, resample)
    return pixels


def rows_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether the height is changed before the width: if it loses more than twice as many pixels as the width.

    So does Pillow 13, and it is done here whatever Pillow does, so that the bits do not depend on its version.

    Args:
        old, new: heights and widths.
    """
    return 0 < old[0] - new[0] > _ROWS_FIRST_BELOW * (old[1] - new[1])


def _one_edge(pixels: PixelArray, height: int, width: int, resample: Filter) -> PixelArray:
    """A picture of which one edge is resized."""
    if compiled is None or resample not in _COMPILED or min(*pixels.shape[:2], height, width) < _SMALLEST:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize((width, height), Image.Resampling[resample.upper()]))
    old_height, old_width, _ = pixels.shape
    new = np.empty((height, width, 3), np.uint8)
    compiled.resize(np.ascontiguousarray(pixels), old_height, old_width, new, height, width, _COMPILED[resample])
    return new

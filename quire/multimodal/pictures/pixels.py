"""Pixels: pictures resized and divided for an encoder, as the image processors of Hugging Face do it with Pillow."""

from __future__ import annotations

import numpy as np
from PIL import Image

from quire.engine.client.pictures import (
    AnyResolution,
    CanvasTiles,
    Color,
    Filter,
    FixedSize,
    Geometry,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchBudget,
    PatchRows,
    SmartResize,
    SplitTiles,
    TokenBudget,
    TransformersProcessor,
)
from quire.engine.client.protocol import PixelArray
from quire.multimodal.pictures.layout import (
    PictureLayout,
    best_canvas,
    canvas_grid,
    canvas_size,
    crops,
    fit_on_canvas,
    fixed_size,
    grid_of_tiles,
    padded_grid,
    padded_size,
    split_grid,
    split_sizes,
)
from quire.multimodal.pictures.resize import changes_height_first, resized, resized_bands

_SQUARE_BAND = 1 << 20  # pixels of rows that are resized at once


def picture_pixels(geometry: Geometry, picture: Image.Image, layout: PictureLayout) -> PixelArray:
    """The pixels of all items of a picture, which have images of one size.

    Args:
        geometry: how the picture is resized and divided.
        picture: in RGB.
        layout: its layout.

    Returns:
        Pixels of (images, height, width, 3); those of the first item stand first.
    """
    pixels: PixelArray = np.asarray(picture)
    match geometry:
        case FixedSize():
            return _fixed(geometry, pixels)[None]
        case SmartResize() | PatchRows() | PatchBudget() | TokenBudget():
            item = layout.items[0]
            return resized(pixels, item.height, item.width, geometry.resample)[None]
        case SplitTiles():
            return _split(geometry, pixels)
        case AnyResolution():
            return _any_resolution(geometry, pixels)
        case GridTiles():
            return _grid(geometry, pixels)
        case PanAndScan():
            parts = [pixels]
            for top, left, bottom, right in crops(geometry, picture.height, picture.width):
                parts.append(pixels[top:bottom, left:right])
            return np.stack([resized(part, geometry.height, geometry.width, geometry.resample) for part in parts])
        case PaddedTiles():
            return _padded(geometry, pixels)
        case CanvasTiles():
            return _canvas(geometry, pixels)
        case TransformersProcessor():
            raise TypeError("only the model's processor prepares pictures for it")


def _divide(pixels: PixelArray, tiles: PixelArray) -> None:
    """Write the tiles of an image, row by row."""
    _, height, width, _ = tiles.shape
    down, across = pixels.shape[0] // height, pixels.shape[1] // width
    grid = tiles.reshape(down, across, height, width, 3)
    grid[:] = pixels.reshape(down, height, across, width, 3).swapaxes(1, 2)


def _fixed(fixed: FixedSize, pixels: PixelArray) -> PixelArray:
    height, width = fixed_size(fixed, *pixels.shape[:2])
    if fixed.square_color is not None:
        pixels = _square(pixels, height, width, fixed.square_color, fixed.resample)
    pixels = resized(pixels, height, width, fixed.resample)
    return pixels if fixed.shortest_edge is None else _middle(pixels, fixed.height, fixed.width)


def _square(pixels: PixelArray, height: int, width: int, color: Color, resample: Filter) -> PixelArray:
    """The square with an image in its middle, whose edges are of a colour; it has the width of the new size already.

    Of a long image the square would be many times as large as the image: it is made and resized some rows at a time.
    Resizing to another width changes each row by itself, and no row of one colour.
    """
    edge = max(pixels.shape[:2])
    if changes_height_first((edge, edge), (height, width)):  # then the square is small: less than twice the new width
        return _centered(pixels, edge, edge, color)
    square = np.empty((edge, width, 3), np.uint8)
    square[:] = color
    top = (edge - pixels.shape[0]) // 2
    rows = max(16, _SQUARE_BAND // edge)
    for first in range(0, pixels.shape[0], rows):
        band = pixels[first : first + rows]
        wide = _centered(band, len(band), edge, color)
        square[top + first : top + first + len(band)] = resized(wide, len(band), width, resample)
    return square


def _centered(pixels: PixelArray, height: int, width: int, color: Color = (0, 0, 0)) -> PixelArray:
    """An image in the middle of a larger one of a colour."""
    if pixels.shape[:2] == (height, width):
        return pixels
    larger = np.empty((height, width, 3), np.uint8)
    larger[:] = color
    top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
    larger[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return larger


def _middle(pixels: PixelArray, height: int, width: int) -> PixelArray:
    """The middle of an image; beyond its edges it is black."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    inside = pixels[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if inside.shape[:2] == (height, width):
        return inside
    middle = np.zeros((height, width, 3), np.uint8)
    top, left = max(0, -top), max(0, -left)
    middle[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return middle


def _split(split: SplitTiles, pixels: PixelArray) -> PixelArray:
    height, width, _ = pixels.shape
    tile, resample = split.tile, split.resample
    first, second = split_sizes(split, height, width)
    rows, columns = split_grid(split, height, width)
    size = second if split.splits else first
    if first != size:
        pixels = resized(pixels, *first, resample)
    if not rows:
        return resized(resized(pixels, *size, resample), tile, tile, resample)[None]
    tiles = np.empty((rows * columns + 1, tile, tile, 3), np.uint8)
    if changes_height_first(size, (tile, tile)):
        pixels = resized(pixels, *size, resample)
        _divide(pixels, tiles[:-1])
        tiles[-1] = resized(pixels, tile, tile, resample)
        return tiles
    narrow = np.empty((size[0], tile, 3), np.uint8)
    for row, band in enumerate(resized_bands(pixels, *size, resample, tile)):
        _divide(band, tiles[row * columns : (row + 1) * columns])
        narrow[row * tile : (row + 1) * tile] = resized(band, tile, tile, resample)
    tiles[-1] = resized(narrow, tile, tile, resample)
    return tiles


def _any_resolution(anyres: AnyResolution, pixels: PixelArray) -> PixelArray:
    height, width, _ = pixels.shape
    tile = anyres.tile
    canvas = best_canvas(anyres, height, width)
    enlarged = resized(pixels, *fit_on_canvas(canvas, height, width), anyres.resample)
    tiles = np.empty((1 + canvas[0] * canvas[1] // tile**2, tile, tile, 3), np.uint8)
    tiles[0] = resized(pixels, tile, tile, anyres.resample)
    _divide(_centered(enlarged, *canvas), tiles[1:])
    return tiles


def _grid(grid: GridTiles, pixels: PixelArray) -> PixelArray:
    rows, columns = grid_of_tiles(grid, *pixels.shape[:2]) if grid.max_tiles > 1 else (1, 1)
    whole = resized(pixels, grid.height, grid.width, grid.resample)
    if rows * columns == 1:
        return whole[None]
    tiles = np.empty((rows * columns + 1, *whole.shape), np.uint8)
    size = rows * grid.height, columns * grid.width
    for row, band in enumerate(resized_bands(pixels, *size, grid.resample, grid.height)):
        _divide(band, tiles[row * columns : (row + 1) * columns])
    tiles[-1] = whole
    return tiles


def _padded(padded: PaddedTiles, pixels: PixelArray) -> PixelArray:
    height, width, _ = pixels.shape
    rows, columns = padded_grid(padded, height, width)
    canvas = np.full((rows * padded.tile, columns * padded.tile, 3), 255, np.uint8)
    new_height, new_width = padded_size(padded, height, width)
    canvas[:new_height, :new_width] = resized(pixels, new_height, new_width, padded.resample)
    tiles = np.empty((rows * columns, padded.tile, padded.tile, 3), np.uint8)
    _divide(canvas, tiles)
    return tiles


def _canvas(canvas: CanvasTiles, pixels: PixelArray) -> PixelArray:
    height, width, _ = pixels.shape
    rows, columns = canvas_grid(canvas, height, width)
    tile, several = canvas.tile, rows * columns > 1
    tiles = np.empty((rows * columns + several, tile, tile, 3), np.uint8)
    whole = np.zeros((rows * tile, columns * tile, 3), np.uint8)
    new_height, new_width = canvas_size(canvas, height, width)
    whole[:new_height, :new_width] = resized(pixels, new_height, new_width, canvas.resample)
    _divide(whole, tiles[: rows * columns])
    if several:
        tiles[-1] = resized(pixels, tile, tile, canvas.resample)
    return tiles

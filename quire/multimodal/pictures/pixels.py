"""Pixels: pictures resized and divided for an encoder, as the image processors of Hugging Face do it with Pillow."""

from __future__ import annotations

import numpy as np
from PIL import Image

from quire.engine.client.pictures import (
    AnyResolution,
    Filter,
    FixedSize,
    Geometry,
    GridTiles,
    PanAndScan,
    PatchRows,
    SmartResize,
    SplitTiles,
)
from quire.engine.client.protocol import PixelArray
from quire.multimodal.pictures.layout import (
    PictureLayout,
    best_canvas,
    crops,
    fit_on_canvas,
    grid_of_tiles,
    split_grid,
    split_sizes,
)


def picture_pixels(geometry: Geometry, picture: Image.Image, layout: PictureLayout) -> PixelArray:
    """The pixels of all items of a picture, which have images of one size.

    Args:
        geometry: how the picture is resized and divided.
        picture: in RGB.
        layout: its layout.

    Returns:
        Pixels of (images, height, width, 3); those of the first item stand first.
    """
    match geometry:
        case FixedSize():
            return _pixels(_fixed(geometry, picture))[None]
        case SmartResize() | PatchRows():
            item = layout.items[0]
            return _pixels(_resized(picture, item.height, item.width, geometry.resample))[None]
        case SplitTiles():
            return _split(geometry, picture)
        case AnyResolution():
            return _any_resolution(geometry, picture)
        case GridTiles():
            return _grid(geometry, picture)
        case PanAndScan():
            boxes = [(0, 0, picture.height, picture.width), *crops(geometry, picture.height, picture.width)]
            parts = [picture.crop((left, top, right, bottom)) for top, left, bottom, right in boxes]
            resized = [_resized(part, geometry.height, geometry.width, geometry.resample) for part in parts]
            return np.stack([_pixels(image) for image in resized])


def _pixels(image: Image.Image) -> PixelArray:
    return np.asarray(image)


def _resized(image: Image.Image, height: int, width: int, resample: Filter) -> Image.Image:
    """The image in a size; itself if it has that size."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling[resample.upper()])


def _divide(image: Image.Image, tiles: PixelArray) -> None:
    """Write the tiles of an image, row by row."""
    _, height, width, _ = tiles.shape
    down, across = image.height // height, image.width // width
    grid = tiles.reshape(down, across, height, width, 3)
    grid[:] = _pixels(image).reshape(down, height, across, width, 3).swapaxes(1, 2)


def _fixed(fixed: FixedSize, picture: Image.Image) -> Image.Image:
    if fixed.square_color is not None:
        picture = _square(picture, fixed.square_color)
    if fixed.shortest_edge is None:
        return _resized(picture, fixed.height, fixed.width, fixed.resample)
    edge = fixed.shortest_edge
    longer = int(edge * max(picture.size) / min(picture.size))
    height, width = (longer, edge) if picture.width <= picture.height else (edge, longer)
    resized = _resized(picture, height, width, fixed.resample)
    top, left = (height - fixed.height) // 2, (width - fixed.width) // 2
    return resized.crop((left, top, left + fixed.width, top + fixed.height))  # beyond its edges it is black


def _square(picture: Image.Image, color: tuple[int, int, int]) -> Image.Image:
    edge = max(picture.size)
    if picture.width == picture.height:
        return picture
    square = Image.new("RGB", (edge, edge), color)
    square.paste(picture, ((edge - picture.width) // 2, (edge - picture.height) // 2))
    return square


def _split(split: SplitTiles, picture: Image.Image) -> PixelArray:
    first, second = split_sizes(split, picture.height, picture.width)
    resized = _resized(picture, *first, split.resample)
    if split.splits:
        resized = _resized(resized, *second, split.resample)
    whole = _pixels(_resized(resized, split.tile, split.tile, split.resample))
    rows, columns = split_grid(split, picture.height, picture.width)
    if not rows:
        return whole[None]
    pixels = np.empty((rows * columns + 1, *whole.shape), np.uint8)
    _divide(resized, pixels[:-1])
    pixels[-1] = whole
    return pixels


def _any_resolution(anyres: AnyResolution, picture: Image.Image) -> PixelArray:
    tile = anyres.tile
    canvas_height, canvas_width = canvas_size = best_canvas(anyres, picture.height, picture.width)
    height, width = fit_on_canvas(canvas_size, picture.height, picture.width)
    canvas = Image.new("RGB", (canvas_width, canvas_height))
    resized = _resized(picture, height, width, anyres.resample)
    canvas.paste(resized, ((canvas_width - width) // 2, (canvas_height - height) // 2))
    pixels = np.empty((1 + canvas_height * canvas_width // tile**2, tile, tile, 3), np.uint8)
    pixels[0] = _pixels(_resized(picture, tile, tile, anyres.resample))
    _divide(canvas, pixels[1:])
    return pixels


def _grid(grid: GridTiles, picture: Image.Image) -> PixelArray:
    rows, columns = grid_of_tiles(grid, picture.height, picture.width) if grid.max_tiles > 1 else (1, 1)
    resized = _resized(picture, rows * grid.height, columns * grid.width, grid.resample)
    if rows * columns == 1:
        return _pixels(resized)[None]
    pixels = np.empty((rows * columns + 1, grid.height, grid.width, 3), np.uint8)
    _divide(resized, pixels[:-1])
    pixels[-1] = _pixels(_resized(picture, grid.height, grid.width, grid.resample))
    return pixels

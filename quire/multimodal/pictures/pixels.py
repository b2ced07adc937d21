"""Pixels: pictures resized and divided for an encoder, as the image processors of Hugging Face do it with Pillow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
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


def item_pixels(geometry: Geometry, picture: Image.Image, layout: PictureLayout) -> list[PixelArray]:
    """The pixels of each item of a picture.

    Args:
        geometry: how the picture is resized and divided.
        picture: in RGB.
        layout: its layout.

    Returns:
        Arrays of (images, height, width, 3), in the order of the items.
    """
    match geometry:
        case FixedSize():
            return [_pixels(_fixed(geometry, picture))[None]]
        case SmartResize() | PatchRows():
            item = layout.items[0]
            return [_pixels(_resized(picture, item.height, item.width, geometry.resample))[None]]
        case SplitTiles():
            return _split(geometry, picture)
        case AnyResolution():
            return [_any_resolution(geometry, picture)]
        case GridTiles():
            return _grid(geometry, picture)
        case PanAndScan():
            boxes = [(0, 0, picture.height, picture.width), *crops(geometry, picture.height, picture.width)]
            parts = [picture.crop((left, top, right, bottom)) for top, left, bottom, right in boxes]
            return [
                _pixels(_resized(part, geometry.height, geometry.width, geometry.resample))[None] for part in parts
            ]


def _pixels(image: Image.Image) -> NDArray[np.uint8]:
    return np.array(image)


def _resized(image: Image.Image, height: int, width: int, resample: Filter) -> Image.Image:
    """The image in a size; itself if it has that size."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling[resample.upper()])


def _tiles(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """The tiles of an image, row by row."""
    down, across = image.height // height, image.width // width
    tiles = _pixels(image).reshape(down, height, across, width, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(-1, height, width, 3)


def _items_of(tiles: NDArray[np.uint8]) -> list[PixelArray]:
    """Each tile as an item."""
    return [tiles[index : index + 1] for index in range(len(tiles))]


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


def _split(split: SplitTiles, picture: Image.Image) -> list[PixelArray]:
    first, second = split_sizes(split, picture.height, picture.width)
    resized = _resized(picture, *first, split.resample)
    if split.splits:
        resized = _resized(resized, *second, split.resample)
    whole = _pixels(_resized(resized, split.tile, split.tile, split.resample))[None]
    if split_grid(split, picture.height, picture.width) == (0, 0):
        return [whole]
    return [*_items_of(_tiles(resized, split.tile, split.tile)), whole]


def _any_resolution(anyres: AnyResolution, picture: Image.Image) -> PixelArray:
    tile = anyres.tile
    canvas_height, canvas_width = canvas_size = best_canvas(anyres, picture.height, picture.width)
    height, width = fit_on_canvas(canvas_size, picture.height, picture.width)
    canvas = Image.new("RGB", (canvas_width, canvas_height))
    resized = _resized(picture, height, width, anyres.resample)
    canvas.paste(resized, ((canvas_width - width) // 2, (canvas_height - height) // 2))
    whole = _pixels(_resized(picture, tile, tile, anyres.resample))[None]
    return np.concatenate([whole, _tiles(canvas, tile, tile)])


def _grid(grid: GridTiles, picture: Image.Image) -> list[PixelArray]:
    rows, columns = grid_of_tiles(grid, picture.height, picture.width) if grid.max_tiles > 1 else (1, 1)
    resized = _resized(picture, rows * grid.height, columns * grid.width, grid.resample)
    items = _items_of(_tiles(resized, grid.height, grid.width))
    if len(items) > 1:
        items.append(_pixels(_resized(picture, grid.height, grid.width, grid.resample))[None])
    return items

"""Layouts: which tokens stand for a picture, and which images of it are encoded. They follow from its size alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from typing_extensions import override

from quire.engine.client.pictures import (
    MAX_RATIO,
    AnyResolution,
    CanvasTiles,
    FixedSize,
    Geometry,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchBudget,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
    TokenBudget,
    TransformersProcessor,
    VideoInfo,
)
from quire.engine.client.protocol import TokenArray

_LARGEST_EDGE = 4096  # of a picture that `SplitTiles` divides
_FACTOR_STEP, _LARGEST_FACTOR = 1e-5, 100.0  # of resizing, in `PatchBudget`
_SHORTEST_EDGE = 10  # of a picture in `PaddedTiles`
_DIGITS = 7  # to which LLaVA rounds, against errors of floats
_REDUCED_FROM = 1.1  # a picture of so many times the most patches' edge is reduced
Size = tuple[int, int]  # height and width


class LayoutError(ValueError):
    """A picture of this size cannot be prepared for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLayout:
    """The tokens and the images of an item: consecutive tokens of the prompt.

    Attributes:
        images, height, width: number and size of its images.
        row_length: number of placeholders in a row.
        rows: number of rows, which follow each other.
        row_ends: each row is followed by a text token that belongs to the item.
        grid: rows and columns of the tokens' rotary positions; None: those of text.
        original_size: see `PictureItem`.
        is_video: it is a part of a video.
        time: the rotary position of time, from where its video begins.
        shift: rotary positions from there to where it begins; more than 0 behind sound of the video.
        step: rotary positions from where it begins to the token behind it; None: as of a picture. 0: what follows is of
            the same video, and begins at the same position.
        text_before: a text token in front of it belongs to it, and has the rotary position before.
        text_behind: a text token behind it belongs to it, and has the same rotary position as the one behind that.
    """

    images: int
    height: int
    width: int
    row_length: int
    rows: int = 1
    row_ends: bool = False
    grid: Size | None = None
    original_size: Size | None = None
    is_video: bool = False
    time: int = 0
    shift: int = 0
    step: int | None = None
    text_before: bool = False
    text_behind: bool = False

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.text_before + self.rows * (self.row_length + self.row_ends) + self.text_behind

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of its pixels."""
        return self.images, self.height, self.width, 3

    @property
    def size(self) -> int:
        """Bytes of its pixels."""
        return math.prod(self.shape)

    @property
    def repeats(self) -> list[int]:
        """How often each placeholder in the picture's text is repeated."""
        return [self.row_length] * self.rows

    def text_offsets(self) -> TokenArray | None:
        """Which of its tokens are text; see `PictureItem.text_offsets`."""
        if self.text_before or self.text_behind:
            ends = [0] * self.text_before + [self.length - 1] * self.text_behind
            return np.array(ends, np.int32)
        if not self.row_ends:
            return None
        return (np.arange(1, self.rows + 1, dtype=np.int32) * (self.row_length + 1) - 1).astype(np.int32)

    def positions(self) -> TokenArray | None:
        """Rotary positions of its tokens; see `PictureItem.positions`."""
        if self.grid is None:
            return None
        positions = np.full((3, *self.grid), self.time, np.int32)
        positions[1], positions[2] = np.indices(self.grid, np.int32)
        positions = positions.reshape(3, -1) - np.int32(self.shift)
        positions = np.pad(positions, ((0, 0), (self.text_before, 0)), constant_values=-1)
        return np.pad(positions, ((0, 0), (0, self.text_behind)), constant_values=self.step or 0)

    @property
    def advance(self) -> int | None:
        """Rotary positions from where it begins to the token behind it; see `PictureItem.advance`."""
        if self.step is not None:
            return self.step
        return None if self.grid is None else max(self.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedItemLayout(ItemLayout):
    """The tokens of a picture that transformers' processor prepares.

    Attributes:
        runs: where each run of placeholders begins, and its length; text stands between them.
        input_bytes: bytes of its inputs.
    """

    runs: tuple[tuple[int, int], ...]
    input_bytes: int

    @property
    @override
    def length(self) -> int:
        return sum(self.runs[-1])

    @property
    @override
    def size(self) -> int:
        return self.input_bytes

    @property
    @override
    def repeats(self) -> list[int]:
        return [length for _, length in self.runs]

    @override
    def text_offsets(self) -> TokenArray | None:
        ends = [start + length for start, length in self.runs[:-1]]
        text = [np.arange(end, start) for end, (start, _) in zip(ends, self.runs[1:], strict=True)]
        return np.concatenate(text).astype(np.int32) if text else None


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """What stands for a picture.

    Attributes:
        text: stands for it in a rendered chat, with one placeholder for each row of an item: it is repeated once the
            text is tokenized.
        items: its items, in the order of their tokens.
    """

    text: str
    items: tuple[ItemLayout, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all items."""
        return sum(item.length for item in self.items)

    @property
    def size(self) -> int:
        """Bytes of the pixels of all items."""
        return sum(item.size for item in self.items)


def layout(info: PictureInfo, height: int, width: int) -> PictureLayout:
    """The layout of a picture.

    Args:
        info: facts about the model.
        height, width: size of the picture, at least 1.

    Raises:
        LayoutError: the model cannot read a picture of this size.
    """
    _check_ratio(height, width)
    match info.geometry:
        case FixedSize() as fixed:
            return _whole(info, _fixed_item(fixed))
        case SmartResize() as smart:
            return _whole(info, _smart_item(smart, *smart_size(smart, height, width)))
        case SplitTiles() as split:
            return _split(info, split, height, width)
        case PatchRows() as rows:
            return _rows(info, rows, height, width)
        case AnyResolution() as anyres:
            return _whole(info, _any_resolution_item(anyres, height, width))
        case GridTiles() as grid:
            return _grid(info, grid, height, width)
        case PanAndScan() as scan:
            return _pan_and_scan(info, scan, height, width)
        case PatchBudget() as budget:
            height, width = budget_size(budget, height, width)
            return _whole(info, ItemLayout(images=1, height=height, width=width, row_length=budget.tokens))
        case TokenBudget() as budget:
            return _whole(info, _token_budget_item(budget, height, width))
        case PaddedTiles() as padded:
            return _whole(info, _padded_item(padded, height, width))
        case CanvasTiles() as canvas:
            return _canvas(info, canvas, height, width)
        case TransformersProcessor():
            raise LayoutError("Only the model's processor knows what becomes of a picture.")


def pixels_between(geometry: Geometry, planned: PictureLayout, height: int, width: int) -> int:
    """Pixels of the largest image between a picture and its items: one that is larger than both.

    Args:
        geometry: how the picture is resized and divided.
        planned: its layout.
        height, width: its size.
    """
    most = height * planned.items[0].width  # an image whose height has not been changed yet
    match geometry:
        case FixedSize() as fixed:
            new_height, new_width = fixed_size(fixed, height, width)
            first = height if fixed.square_color is None else max(height, width)
            return max(most, new_height * new_width, first * new_width)
        case SplitTiles() as split:
            first_size, second_size = split_sizes(split, height, width)
            return max(most, height * first_size[1], math.prod(first_size), math.prod(second_size))
        case _:
            return most


def frame_layout(info: VideoInfo, height: int, width: int, frames: int) -> PictureLayout:
    """The layout of one frame of a video, as of a picture.

    Args:
        info: facts about the model.
        height, width: size of the frame, at least 1.
        frames: number of frames of the video that are read.

    Raises:
        LayoutError: the model cannot read a picture of this size.
    """
    _check_ratio(height, width)
    match info.geometry:
        case FixedSize() as fixed:
            return _whole(info, _fixed_item(fixed))
        case SmartResize() as smart:
            size = smart_size(smart, height, width, frames if info.shares_area else None)
            return _whole(info, _smart_item(smart, *size))
        case SplitTiles() as split:
            return _split(info, split, height, width)
        case TokenBudget() as budget:
            return _whole(info, _token_budget_item(budget, height, width))


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > MAX_RATIO * min(height, width):
        raise LayoutError(
            f"The picture has {width} x {height} pixels; its longer edge may be at most {MAX_RATIO} times as long as "
            "the shorter one."
        )


def _fixed_item(fixed: FixedSize) -> ItemLayout:
    return ItemLayout(images=1, height=fixed.height, width=fixed.width, row_length=fixed.tokens)


def _whole(info: PictureInfo | VideoInfo, item: ItemLayout) -> PictureLayout:
    return PictureLayout(f"{info.before}{info.token}{info.after}", (item,))


def fixed_size(fixed: FixedSize, height: int, width: int) -> Size:
    """The size to which a picture is resized, before its middle is cut out of it."""
    edge = fixed.shortest_edge
    if edge is None:
        return fixed.height, fixed.width
    if fixed.square_color is not None:
        return edge, edge
    longer = int(edge * max(height, width) / min(height, width))
    return (longer, edge) if width <= height else (edge, longer)


def smart_size(smart: SmartResize, height: int, width: int, frames: int | None = None) -> Size:
    """The size to which a picture is resized. `frames`: of a video that has the area together."""
    multiple = smart.multiple
    frames, counted = (smart.frames, smart.frames) if frames is None else (frames, round(frames / 2) * 2)
    if smart.enlarges and min(height, width) < multiple:
        height, width = _enlarged(smart, height, width)
    new_height, new_width = (round(edge / multiple) * multiple for edge in (height, width))
    area = frames * height * width
    if counted * new_height * new_width > smart.max_pixels:
        divisor = math.sqrt(area / smart.max_pixels)
        return (
            max(multiple, math.floor(height / divisor / multiple) * multiple),
            max(multiple, math.floor(width / divisor / multiple) * multiple),
        )
    if counted * new_height * new_width < smart.min_pixels:
        factor = math.sqrt(smart.min_pixels / area)
        return math.ceil(height * factor / multiple) * multiple, math.ceil(width * factor / multiple) * multiple
    return new_height, new_width


def budget_size(budget: PatchBudget, height: int, width: int) -> Size:
    """The size to which a picture is resized: by about the largest factor with which it has not too many patches."""

    def scaled(factor: float) -> Size:
        rows, columns = (max(1, math.ceil(edge * factor / budget.patch)) for edge in (height, width))
        return rows, columns

    fits, exceeds = _FACTOR_STEP / 10, _LARGEST_FACTOR
    while exceeds - fits >= _FACTOR_STEP:
        middle = (fits + exceeds) / 2
        if math.prod(scaled(middle)) <= budget.max_patches:
            fits = middle
        else:
            exceeds = middle
    rows, columns = scaled(fits)
    return rows * budget.patch, columns * budget.patch


def _token_budget_item(budget: TokenBudget, height: int, width: int) -> ItemLayout:
    rows, columns = token_grid(budget, height, width)
    size = rows * budget.multiple, columns * budget.multiple
    return ItemLayout(images=1, height=size[0], width=size[1], row_length=rows * columns)


def token_grid(budget: TokenBudget, height: int, width: int) -> Size:
    """Rows and columns of the tokens of a picture, which are as many as its shape allows.

    Raises:
        LayoutError: there is no room for one token.
    """
    multiple, most = budget.multiple, budget.max_tokens
    factor = math.sqrt(most * multiple**2 / (height * width))
    rows, columns = (math.floor(factor * edge / multiple) for edge in (height, width))
    if not rows and columns:  # a long picture is one token high, or wide
        return 1, min(width // height, most)
    if rows and not columns:
        return min(height // width, most), 1
    if not rows or rows * columns > most:
        raise LayoutError(f"A picture of {width} x {height} pixels cannot be divided into {most} tokens or fewer.")
    return rows, columns


def _enlarged(smart: SmartResize, height: int, width: int) -> Size:
    """The size of a picture whose shorter edge becomes that of a token."""
    multiple = smart.multiple
    if not smart.rounds:
        scale = max(multiple / height, multiple / width)
        return int(height * scale), int(width * scale)
    if height < multiple:
        height, width = multiple, round(width * multiple / height)
    if width < multiple:
        height, width = round(height * multiple / width), multiple
    return height, width


def _smart_item(smart: SmartResize, height: int, width: int) -> ItemLayout:
    grid = height // smart.multiple, width // smart.multiple
    return ItemLayout(images=1, height=height, width=width, row_length=math.prod(grid), grid=grid)


def split_sizes(split: SplitTiles, height: int, width: int) -> tuple[Size, Size]:
    """The sizes to which a picture is resized before it is divided: first the one, then the other."""
    first = _limited(*_with_longest_edge(height, width, split.longest_edge), _LARGEST_EDGE)
    height, width = first
    ratio = width / height
    if width >= height:
        width = _whole_tiles(width, split.tile)
        height = _whole_tiles(int(width / ratio), split.tile)
    else:
        height = _whole_tiles(height, split.tile)
        width = _whole_tiles(int(height * ratio), split.tile)
    return first, (height, width)


def _with_longest_edge(height: int, width: int, longest: int) -> Size:
    """The size with this longer edge; the shorter one is even."""
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return max(1, shorter + shorter % 2), longest
    shorter = int(longest * ratio)
    return longest, max(1, shorter + shorter % 2)


def _limited(height: int, width: int, longest: int) -> Size:
    """The size, or one of the same shape whose longer edge is at the limit."""
    ratio = width / height
    if width >= height and width > longest:
        return max(1, int(longest / ratio)), longest
    if height > width and height > longest:
        return longest, max(1, int(longest * ratio))
    return height, width


def _whole_tiles(length: int, tile: int) -> int:
    return math.ceil(length / tile) * tile


def split_grid(split: SplitTiles, height: int, width: int) -> Size:
    """Rows and columns of the tiles of a picture; (0, 0) if it is not divided."""
    if not split.splits:
        return 0, 0
    _, (height, width) = split_sizes(split, height, width)
    if max(height, width) <= split.tile:
        return 0, 0
    return height // split.tile, width // split.tile


def _split(info: PictureInfo | VideoInfo, split: SplitTiles, height: int, width: int) -> PictureLayout:
    rows, columns = split_grid(split, height, width)
    tile = ItemLayout(images=1, height=split.tile, width=split.tile, row_length=split.tokens)
    fence = "<fake_token_around_image>"
    lines = [
        "".join(f"{fence}<row_{row + 1}_col_{column + 1}>{info.token}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    end = f"{fence}<global-img>{info.token}{fence}"
    return PictureLayout("".join(lines) + ("\n" if lines else "") + end, (tile,) * (rows * columns + 1))


def _rows(info: PictureInfo, rows: PatchRows, height: int, width: int) -> PictureLayout:
    ratio = max(height, width) / rows.longest_edge
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    down, across = math.ceil(height / rows.patch), math.ceil(width / rows.patch)
    item = ItemLayout(
        images=1,
        height=down * rows.patch,
        width=across * rows.patch,
        row_length=across,
        rows=down,
        row_ends=True,
    )
    text = f"{info.token}{rows.row_end}" * (down - 1) + f"{info.token}{rows.end}"
    return PictureLayout(f"{info.before}{text}{info.after}", (item,))


def best_canvas(anyres: AnyResolution, height: int, width: int) -> Size:
    """The canvas on which most of a picture's pixels can be seen; of equal ones that of which least is wasted."""

    def merit(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        return seen, seen - math.prod(canvas)

    return max(anyres.canvases, key=merit)


def fit_on_canvas(canvas: Size, height: int, width: int) -> Size:
    """The size of a picture that is enlarged or reduced until it touches two edges of a canvas."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def _any_resolution_item(anyres: AnyResolution, height: int, width: int) -> ItemLayout:
    canvas = best_canvas(anyres, height, width)
    down, across = canvas[0] // anyres.tile, canvas[1] // anyres.tile
    patch_rows, patch_columns = _covered_patches(anyres, (down, across), height, width)
    return ItemLayout(
        images=1 + down * across,
        height=anyres.tile,
        width=anyres.tile,
        row_length=anyres.tokens + patch_rows * (patch_columns + 1),
        original_size=(height, width),
    )


def _covered_patches(anyres: AnyResolution, tiles: Size, height: int, width: int) -> Size:
    """Rows and columns of the patches of a canvas that a picture covers."""
    rows, columns = tiles[0] * anyres.patches, tiles[1] * anyres.patches
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), _DIGITS))
        rows -= (rows - covered) // 2 * 2
    else:
        covered = int(round(width * (rows / height), _DIGITS))
        columns -= (columns - covered) // 2 * 2
    if anyres.max_tiles is not None:
        ratio = math.sqrt(rows * columns / (anyres.max_tiles * anyres.patches**2))
        if ratio > _REDUCED_FROM:
            return int(rows // ratio), int(columns // ratio)
    return rows, columns


def grid_of_tiles(grid: GridTiles, height: int, width: int) -> Size:
    """Rows and columns of the grid whose shape is nearest to a picture's.

    Of equally near ones it is the first, unless the picture has more than half of the pixels of a later one.
    """
    return _nearest_grid(_grids(grid.min_tiles, grid.max_tiles), grid.height * grid.width, height, width)


def _nearest_grid(grids: Sequence[Size], tile_area: int, height: int, width: int) -> Size:
    ratio, area = width / height, width * height
    best, difference = (1, 1), math.inf
    for rows, columns in grids:
        distance = abs(ratio - columns / rows)
        covers = area > 0.5 * tile_area * columns * rows
        if distance < difference or (distance == difference and covers):
            best, difference = (rows, columns), distance
    return best


@lru_cache(maxsize=32)
def _grids(least: int, most: int) -> tuple[Size, ...]:
    """Rows and columns of all grids with a number of tiles, small ones first."""
    edges = range(1, most + 1)
    grids = [(rows, columns) for columns in edges for rows in edges if least <= rows * columns <= most]
    return tuple(sorted(grids, key=math.prod))


def _grid(info: PictureInfo, grid: GridTiles, height: int, width: int) -> PictureLayout:
    rows, columns = grid_of_tiles(grid, height, width) if grid.max_tiles > 1 else (1, 1)
    tiles = rows * columns
    tile = ItemLayout(images=1, height=grid.height, width=grid.width, row_length=grid.tokens)
    items = (tile,) * (tiles if tiles == 1 else tiles + 1)
    return PictureLayout(f"{info.before}{info.token * len(items)}{info.after}", items)


def crops(scan: PanAndScan, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """The parts of a long picture, as (top, left, bottom, right); none of another one."""
    longer, shorter = max(height, width), min(height, width)
    if not scan.splits or longer / shorter < scan.min_ratio:
        return []
    count = min(longer // scan.min_crop, math.floor(longer / shorter + 0.5))
    count = min(scan.max_crops, max(2, count))
    edge = math.ceil(longer / count)
    if min(edge, shorter) < scan.min_crop:
        return []
    return list(_cut(width >= height, edge, count, height, width))


def _cut(across: bool, edge: int, count: int, height: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    for start in range(0, edge * count, edge):
        if across:
            yield 0, start, height, min(start + edge, width)
        else:
            yield start, 0, min(start + edge, height), width


def _pan_and_scan(info: PictureInfo, scan: PanAndScan, height: int, width: int) -> PictureLayout:
    image = ItemLayout(images=1, height=scan.height, width=scan.width, row_length=scan.tokens)
    count = len(crops(scan, height, width))
    one = f"{info.before}{info.token}{info.after}"
    if not count:
        return PictureLayout(one, (image,))
    return PictureLayout(f"{scan.introduction}{one}{scan.between}" + " ".join([one] * count), (image,) * (count + 1))


def canvas_grid(canvas: CanvasTiles, height: int, width: int) -> Size:
    """Rows and columns of the tiles of a picture: those of the grid that changes its size least, if it enlarges it.

    If none does, the grid that reduces it least. Of equal ones the smallest. In floats of 32 bits, as in transformers.
    """
    grids = _grids_by_ratio(canvas.max_tiles)
    sizes = np.array(grids, np.float32) * np.float32(canvas.tile)
    scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
    enlarging = scales[scales >= 1]
    scale = scales.max() if not len(enlarging) or canvas.enlarges else enlarging.min()
    return min((grid for grid, fits in zip(grids, scales == scale, strict=True) if fits), key=math.prod)


@lru_cache(maxsize=32)
def _grids_by_ratio(most: int) -> tuple[Size, ...]:
    """Rows and columns of all grids of up to so many tiles; large ones first, those of a shape together."""
    by_ratio: dict[float, list[Size]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                by_ratio.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return tuple(grid for grids in by_ratio.values() for grid in grids)


def canvas_size(canvas: CanvasTiles, height: int, width: int) -> Size:
    """The size to which a picture is resized, so that it touches two edges of its grid, or of one tile."""
    rows, columns = canvas_grid(canvas, height, width)
    most_height, down = _canvas_scale(canvas, rows * canvas.tile, height)
    most_width, across = _canvas_scale(canvas, columns * canvas.tile, width)
    if np.float32(across) < np.float32(down) if np.float32 in (type(across), type(down)) else across < down:
        return max(1, min(math.floor(height * across), most_height)), most_width
    return most_height, max(1, min(math.floor(width * down), most_width))


def _canvas_scale(canvas: CanvasTiles, most: int, edge: int) -> tuple[int, float | np.float32]:
    """How long an edge of a picture may become on its grid, and by which factor.

    transformers divides tensors of 32 bits where the grid limits it, and Python's numbers where it does not.
    """
    if canvas.enlarges or most < max(edge, canvas.tile):
        return most, np.float32(most) / np.float32(edge)
    longest = max(edge, canvas.tile)
    return longest, longest / edge


def _canvas(info: PictureInfo, canvas: CanvasTiles, height: int, width: int) -> PictureLayout:
    rows, columns = canvas_grid(canvas, height, width)
    tile = ItemLayout(images=1, height=canvas.tile, width=canvas.tile, row_length=canvas.tokens)
    tiles = rows * columns if rows * columns > 1 else 0
    row = canvas.tile_end.join([info.token] * columns) + canvas.row_end
    text = (row * rows if tiles else "") + canvas.whole + info.token
    return PictureLayout(f"{info.before}{text}{info.after}", (tile,) * (tiles + 1))


def padded_grid(padded: PaddedTiles, height: int, width: int) -> Size:
    """Rows and columns of the tiles of a picture."""
    rows, columns = math.ceil(height / padded.tile), math.ceil(width / padded.tile)
    if rows * columns <= padded.max_tiles:
        return rows, columns
    return _nearest_grid(_grids(1, padded.max_tiles), padded.tile**2, height, width)


def padded_size(padded: PaddedTiles, height: int, width: int) -> Size:
    """The size to which a picture is resized, so that it touches two edges of its grid.

    Raises:
        LayoutError: nothing would be left of its shorter edge.
    """
    rows, columns = padded_grid(padded, height, width)
    down, across = rows * padded.tile / height, columns * padded.tile / width
    size = (int(height * across), columns * padded.tile) if across < down else (rows * padded.tile, int(width * down))
    if min(size) < _SHORTEST_EDGE:
        raise LayoutError(f"The picture has {width} x {height} pixels; it is too long and narrow for this model.")
    return size


def _padded_item(padded: PaddedTiles, height: int, width: int) -> ItemLayout:
    (rows, columns), size = padded_grid(padded, height, width), padded_size(padded, height, width)
    return ItemLayout(
        images=rows * columns,
        height=padded.tile,
        width=padded.tile,
        row_length=padded.tokens(padded.covered(rows, size[0]), padded.covered(columns, size[1])),
        original_size=size,
    )

"""Decodes picture files with Pillow, and makes the pixels of items of them.

Runs in worker processes: decoders are native code that reads what a stranger has sent.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from PIL import Image, UnidentifiedImageError

from quire.engine.client.pictures import Color, PictureInfo
from quire.engine.client.protocol import FeatureArray, PixelArray
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures.embeddings import read_embeddings, read_grid
from quire.multimodal.pictures.formats import (
    NAMES,
    is_compressed_bmp,
    recognize,
    unsupported_name,
    webp_canvas,
)
from quire.multimodal.pictures.layout import layout
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.pixels import picture_pixels

PARAM = "picture"
WHITE: Color = (255, 255, 255)
_ORIENTATION = 0x0112  # the tag of EXIF
# What undoes each orientation of EXIF.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_BAND = 256  # rows that are converted at once
_LONG_GRAY = ("I;16", "I;16B", "I;16L", "I;16N", "I")  # modes of gray pixels with more than 8 bits
_MOST_GRAY = 0xFFFF


class PictureError(PromptError):
    """A file is not a picture, is broken, or exceeds a limit."""

    def __init__(self, message: str, param: str = PARAM) -> None:
        super().__init__(message, param)

    def __reduce__(self) -> tuple[Any, ...]:
        return PictureError, (str(self), self.param)


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """What is known of a picture before it is decoded.

    Attributes:
        format: of the file.
        height, width: of the picture, the right way up.
        orientation: of the pixels in the file, by EXIF's numbers.
    """

    format: str
    height: int
    width: int
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class Inspect:
    """A job: read the header of a file."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Prepare:
    """A job: decode a file and make the pixels of its items. `background`: behind transparent pixels."""

    content: bytes
    header: PictureHeader
    info: PictureInfo
    background: Color = WHITE


@dataclass(frozen=True, slots=True)
class ReadEmbeddings:
    """A job: read the embeddings of a picture, and its grid, which may be a file as well."""

    content: bytes
    grid: tuple[int, ...] | bytes | None


Job = Inspect | Prepare | ReadEmbeddings
Embeddings = tuple[FeatureArray, tuple[int, ...] | None]  # of a picture, with its grid


def worker(limits: PictureLimits) -> Callable[[Job], PictureHeader | PixelArray | Embeddings]:
    """The function of a worker process."""
    Image.MAX_IMAGE_PIXELS = None  # our own limit is checked

    def do(job: Job) -> PictureHeader | PixelArray | Embeddings:
        match job:
            case Inspect(content):
                return inspect(content, limits)
            case Prepare():
                return prepare(job)
            case ReadEmbeddings(content, grid):
                return read_embeddings(content), read_grid(grid) if isinstance(grid, bytes) else grid

    return do


def inspect(content: bytes, limits: PictureLimits) -> PictureHeader:
    """Read the header of a file, without decoding its pixels.

    Raises:
        PictureError: it is empty, not a picture, broken, or beyond a limit.
    """
    if not content:
        raise PictureError("The file is empty.")
    if len(content) > limits.size:
        raise PictureError(
            f"The file has {len(content)} bytes; this server accepts pictures of {limits.size} (--max-image-size)."
        )
    kind = recognize(content)
    if kind is None:
        _refuse(content)
    if kind == "BMP" and is_compressed_bmp(content):
        raise PictureError("Compressed BMP files are not supported.")
    if kind == "WEBP" and (canvas := webp_canvas(content)) is not None:
        _check_pixels(*canvas, limits)
    picture = _open(content, kind)
    _check_pixels(picture.height, picture.width, limits)
    orientation = _orientation(picture)
    width, height = reversed(picture.size) if orientation in _SIDEWAYS else picture.size
    return PictureHeader(kind, height, width, orientation)


def _refuse(content: bytes) -> NoReturn:
    name = unsupported_name(content)
    if name is None:
        raise PictureError(f"The file is not a picture of a supported format: {NAMES}.")
    raise PictureError(f"{name} files are not supported as pictures; supported formats: {NAMES}.")


def _check_pixels(height: int, width: int, limits: PictureLimits) -> None:
    if height * width > limits.pixels:
        raise PictureError(
            f"The picture has {width} x {height} pixels; this server accepts {limits.pixels} (--max-image-pixels)."
        )
    if not height * width:
        raise PictureError("The picture has no pixels.")


def _open(content: bytes, kind: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=(kind,))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise whatever they come across in a broken file
        raise PictureError(f"The {kind} file is broken: {_reason(error)}.") from error


def _orientation(picture: Image.Image) -> int:
    """The orientation of the pixels; 1 if EXIF does not say, or cannot be read."""
    try:
        orientation = picture.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 as in `_open`; the picture may be intact
        return 1
    return orientation if orientation in _TURNS else 1


def prepare(job: Prepare) -> PixelArray:
    """Decode a file whose header was read, and make the pixels of its items.

    Raises:
        PictureError: it is broken.
    """
    header = job.header
    picture = decoded(job.content, header, job.background)
    return picture_pixels(job.info.geometry, picture, layout(job.info, header.height, header.width))


def decoded(content: bytes, header: PictureHeader, background: Color = WHITE) -> Image.Image:
    """Decode a file whose header was read: the picture in RGB, the right way up.

    Raises:
        PictureError: it is broken.
    """
    picture = _open(content, header.format)
    try:
        picture.load()  # of an animation the first frame
        rgb = to_rgb(picture, background)
    except (PictureError, MemoryError):
        raise
    except Exception as error:  # as in `_open`
        raise PictureError(f"The {header.format} file is broken or truncated: {_reason(error)}.") from error
    del picture
    if header.orientation in _TURNS:
        rgb = rgb.transpose(_TURNS[header.orientation])
    if rgb.size != (header.width, header.height):
        raise PictureError(f"The {header.format} file is broken: its picture has another size than its header says.")
    return rgb


def to_rgb(picture: Image.Image, background: Color) -> Image.Image:
    """A picture in RGB, of 8 bits for each colour; what is transparent shows the background."""
    if picture.mode in _LONG_GRAY:
        return _by_bands(picture, _short_gray)
    if picture.mode == "F":
        raise PictureError("Pictures of floating-point numbers are not supported.")
    if "A" not in picture.getbands() and "a" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    return _by_bands(picture, lambda band: _on_background(band, background))


def _by_bands(picture: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """A picture in RGB, converted some rows at a time: conversions take several copies of them."""
    rgb = Image.new("RGB", picture.size)
    for top in range(0, picture.height, _BAND):
        box = (0, top, picture.width, min(top + _BAND, picture.height))
        rgb.paste(convert(picture.crop(box)), box)
    return rgb


def _short_gray(band: Image.Image) -> Image.Image:
    values = np.clip(np.asarray(band, np.int32), 0, _MOST_GRAY) >> 8
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def _on_background(band: Image.Image, background: Color) -> Image.Image:
    below = Image.new("RGBA", band.size, (*background, 255))
    return Image.alpha_composite(below, band.convert("RGBA")).convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its header cannot be read"
    return (str(error) or type(error).__name__).strip().rstrip(".")[:200]

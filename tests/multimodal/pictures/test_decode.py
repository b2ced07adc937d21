"""Picture files: formats, orientation, transparency, depth; what is refused, and how."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from quire.engine.client.pictures import FixedSize, PictureInfo
from quire.multimodal.pictures.decode import PictureError, Prepare, inspect, prepare, to_rgb, worker
from quire.multimodal.pictures.layout import LayoutError
from quire.multimodal.pictures.limits import PictureLimits
from tests.support.pictures import drawn, encoded

LIMITS = PictureLimits(size=1 << 20, pixels=1 << 20)
WHITE = (255, 255, 255)


def _decoded(content: bytes) -> NDArray[np.uint8]:
    """The picture of a file, as an encoder of pictures of its own size gets it."""
    worker(LIMITS)  # as a process does, before its first job
    header = inspect(content, LIMITS)
    geometry = FixedSize(height=header.height, width=header.width, tokens=1)
    info = PictureInfo(placeholder=1, placeholder_text="p", geometry=geometry)
    (pixels,) = prepare(Prepare(content, header, info))
    return np.asarray(pixels)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG", "AVIF"])
def test_formats_are_decoded(kind: str) -> None:
    picture = drawn(40, 60)
    content = encoded(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    header = inspect(content, LIMITS)
    assert (header.format, header.height, header.width) == (kind, 40, 60)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(_decoded(content), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_the_right_way_up(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(drawn(30, 50), "PNG", exif=exif)
    header = inspect(content, LIMITS)
    assert (header.height, header.width) == ((50, 30) if orientation >= 5 else (30, 50))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(_decoded(content), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGBa", "P", "PA"])
def test_transparent_pixels_show_the_background(mode: str) -> None:
    picture = drawn(600, 20, mode="LA" if mode == "LA" else "RGBA")
    if mode == "P":
        picture = picture.convert("RGB").quantize(16)
        picture.info["transparency"] = 3
    elif mode == "PA":
        picture = picture.convert("RGB").quantize(16).convert("PA")
        picture.putalpha(drawn(600, 20, mode="L"))
    else:
        picture = picture.convert(mode)
    whole = picture.convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), whole).convert("RGB")
    np.testing.assert_array_equal(np.asarray(to_rgb(picture, WHITE)), np.asarray(expected))
    red = np.asarray(to_rgb(picture, (255, 0, 0)))
    assert (red[..., 0] >= red[..., 1]).any()
    assert not np.array_equal(red, np.asarray(expected))


def test_gray_of_sixteen_bits_keeps_its_range() -> None:
    values = np.arange(0, 1 << 16, 16, dtype=np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    decoded = _decoded(file.getvalue())
    np.testing.assert_array_equal(decoded[..., 0], values >> 8)


def test_cmyk_and_bilevel_pictures_become_rgb() -> None:
    cmyk = drawn(20, 30).convert("CMYK")
    assert _decoded(encoded(cmyk, "JPEG")).shape == (20, 30, 3)
    bilevel = drawn(20, 30).convert("1")
    assert set(np.unique(_decoded(encoded(bilevel, "PNG")))) == {0, 255}


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
        red, _, blue = _decoded(content)[4, 4]
        assert red > 240 > 15 > blue, kind


def test_a_bomb_is_refused_from_its_header() -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    with pytest.raises(PictureError, match=r"20000 x 20000 pixels.*--max-image-pixels"):
        inspect(bomb, LIMITS)


def test_the_canvas_of_an_animation_is_checked_before_it_is_made() -> None:
    canvas = (16_000).to_bytes(3, "little") * 2
    content = b"RIFF\0\0\0\0WEBPVP8X" + (10).to_bytes(4, "little") + b"\x02\0\0\0" + canvas + b"\0" * 64
    with pytest.raises(PictureError, match="16001 x 16001 pixels"):
        inspect(content, LIMITS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"nothing", "not a picture of a supported format"),
        (b'<?xml version="1.0"?><SVG xmlns="http://www.w3.org/2000/svg"/>', "SVG files are not supported"),
        (b"%PDF-1.7 ...", "PDF files are not supported as pictures"),
        (b"\0\0\0\x18ftypheic" + b"\0" * 40, "HEIC files are not supported"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, "The PNG file is broken"),
        (b"\xff\xd8\xff", "The JPEG file is broken"),
        (b"BM" + b"\0" * 12 + (40).to_bytes(4, "little") + b"\0" * 12 + b"\1" + b"\0" * 60, "Compressed BMP"),
        (b"\xff" * (LIMITS.size + 1), "--max-image-size"),
    ],
)
def test_what_is_no_picture_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        inspect(content, LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_truncated_files_are_refused(kind: str) -> None:
    content = encoded(drawn(64, 64), kind)
    with pytest.raises(PictureError, match=f"The {kind} file is broken"):
        _decoded(content[: len(content) * 2 // 3])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_any_damage_gives_a_picture_or_an_error_of_the_part(kind: str) -> None:
    content = encoded(drawn(24, 24), kind)
    rng = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(content)
        for place in rng.integers(0, len(damaged), 3):
            damaged[place] = rng.integers(0, 256)
        with suppress(PictureError, LayoutError):
            assert _decoded(bytes(damaged)).dtype == np.uint8

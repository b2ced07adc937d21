"""Pictures, files and URLs in chats that must neither be read for long nor take much memory."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from tests.support.pdf import document, drawn, image_bomb, pdf, stream, stream_bomb
from tests.support.pictures import encoded

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_PICTURE = (240, 320)  # height and width of ordinary ones
Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Medium:
    """What a chat has in one of its messages.

    Attributes:
        kind: of which there are several.
        name: what distinguishes it from others of its kind.
        make: makes the content parts.
        may_be_read: it is within the limits, or may be intact; then an answer is right as well.
    """

    kind: str
    name: str
    make: Callable[[], list[Part]]
    may_be_read: bool = False


def media(address: str) -> list[Medium]:
    """All of them. `address`: of the `bad_web` that they are fetched from, with its port."""
    kinds = (_truncated, _damaged, _bombs, _wrong_types, _long_shapes, _chunks, _animations, _files, _many, _fields)
    return [*(medium for kind in kinds for medium in kind()), *_urls(address)]


def _truncated() -> Iterator[Medium]:
    for kind in FORMATS:
        for tenths in range(1, 10):
            yield Medium("truncated", f"{kind} {tenths}/10", partial(_picture, partial(_cut, kind, tenths)))


def _damaged() -> Iterator[Medium]:
    for kind in FORMATS:
        for seed in range(16):
            make = partial(_picture, partial(_flipped, kind, seed))
            yield Medium("damaged", f"{kind} {seed}", make, may_be_read=True)


def _bombs() -> Iterator[Medium]:
    for edge in (7_072, 10_000, 20_000, 30_000, 65_000):
        for depth, color in ((8, 0), (8, 2), (8, 6), (1, 0), (16, 2), (8, 3)):
            yield Medium(
                "bomb", f"PNG {edge} of {depth} bits, {color}", partial(_picture, partial(png, edge, depth, color))
            )
    for edge in (20_000, 40_000, 65_000):
        for name, of_edge in (("BMP", _bmp), ("GIF", _gif), ("TIFF", _tiff), ("JPEG", _jpeg)):
            yield Medium("bomb", f"{name} {edge}", partial(_picture, partial(of_edge, edge)))
    for edge in (8_000, 12_000, 16_383):
        yield Medium("bomb", f"WebP canvas of {edge}", partial(_picture, partial(_webp, edge)))
    # Within the limit: they are read, and take what they take.
    for depth, color in ((1, 0), (8, 0), (8, 2), (8, 6)):
        make = partial(_picture, partial(png, 7_000, depth, color))
        yield Medium("large", f"PNG 7000 of {depth} bits, {color}", make, may_be_read=True)


def _wrong_types() -> Iterator[Medium]:
    texts = {
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>',
        "SVG with a reference": b'<?xml version="1.0"?><svg><image href="file:///etc/passwd"/></svg>',
        "SVG with entities": b'<!DOCTYPE a [<!ENTITY b "bbbb">]><svg>' + b"&b;" * 100_000 + b"</svg>",
        "HEIC": b"\0\0\0\x18ftypheic" + bytes(100),
        "JPEG XL": b"\xff\x0a" + bytes(100),
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100),
        "ICO": b"\0\0\1\0\1\0" + bytes(100),
        "Photoshop": b"8BPS\0\1" + bytes(100),
        "ZIP": b"PK\3\4" + bytes(100),
        "a program": b"\x7fELF" + bytes(100),
        "HTML": b"<html><script>alert(1)</script></html>",
        "MP4": b"\0\0\0\x18ftypisom" + bytes(100),
        "PDF": b"%PDF-1.7\n" + bytes(100),
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(100),
        "nothing but zeros": bytes(1 << 20),
        "noise": random.Random(1).randbytes(1 << 20),
    }
    for name, content in texts.items():
        for kind in ("image/png", "image/svg+xml"):
            yield Medium("wrong type", f"{name} as {kind}", partial(repeated, _image_url(content, kind)))


def _long_shapes() -> Iterator[Medium]:
    for long in (201, 1_000, 10_000, 65_000):
        for size in ((1, long), (long, 1), (2, 450 * long // 201)):
            yield Medium("long", f"{size[1]} x {size[0]}", partial(_picture, partial(_plain, size)))


def _chunks() -> Iterator[Medium]:
    for name in (b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tEXt"):
        for megabytes in (1, 50, 500):
            make = partial(_picture, partial(_png_with, name, megabytes << 20))
            yield Medium("chunk", f"{name.decode()} of {megabytes} MB", make, may_be_read=True)


def _animations() -> Iterator[Medium]:
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        for frames in (2, 50, 500):
            make = partial(_picture, partial(_animation, kind, frames))
            yield Medium("animation", f"{kind} of {frames} frames", make, may_be_read=True)


def _files() -> Iterator[Medium]:
    for side in (3_000, 10_000, 30_000, 60_000):
        yield Medium("PDF", f"picture of {side}", partial(_pdf_file, partial(image_bomb, side)), may_be_read=True)
    for power in (22, 25, 28, 30):
        make = partial(_pdf_file, partial(stream_bomb, 1 << power))
        yield Medium("PDF", f"stream of 2**{power} bytes", make, may_be_read=True)
    for count in (100_000, 300_000, 1_000_000, 3_000_000):
        for name, operators in _DRAWN.items():
            make = partial(_pdf_file, partial(_drawing, operators, count))
            yield Medium("PDF", f"{count} {name}", make, may_be_read=True)
    for pages in (33, 1_000, 50_000):
        yield Medium("PDF", f"{pages} pages", partial(_pdf_file, partial(_pages, pages)))
    broken: dict[str, Callable[[], bytes]] = {
        "without an end": lambda: pdf("x")[:200],
        "with nothing": lambda: b"%PDF-1.4\n",
        "of zeros": lambda: b"%PDF-1.7\n" + bytes(20 << 20),
        "with itself as parent": lambda: pdf("x").replace(b"/Parent 2 0 R", b"/Parent 4 0 R"),
        "with pages in a circle": lambda: pdf("x").replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"),
        "with half an xref": lambda: pdf("x").replace(b"xref", b"xrxf"),
        "of huge pages": lambda: pdf("x", size=(14_400_000, 14_400_000)),
        "of no size": lambda: pdf("x", size=(0, 0)),
    }
    for name, of_pdf in broken.items():
        yield Medium("PDF", name, partial(_pdf_file, of_pdf), may_be_read=True)
    for name, content in {"ZIP": b"PK\3\4" + bytes(1 << 20), "latin": b"\xe9t\xe9 " * 1000, "NUL": b"a\0b"}.items():
        yield Medium("file", name, partial(_pdf_file, partial(bytes, content)))
    yield Medium("file", "20 MB of text", partial(_pdf_file, lambda: b"word " * (4 << 20)))


_DRAWN = {
    "paths": b"1 0 0 RG 3 4 m 200 150 l S\n",
    "curves": b"3 4 m 20 180 250 10 290 190 c 9 9 l f\n",
    "glyphs": b"BT /F1 9 Tf 9 9 Td (abc) Tj ET\n",
    "states": b"q 1 0 0 1 1 1 cm\n",
    "clips": b"0 0 99 99 re W n\n",
}


def _many() -> Iterator[Medium]:
    small = base64.b64encode(_plain((8, 8))).decode()
    parts: dict[str, Part] = {
        "pictures": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{small}"}},
        "files": {"type": "file", "file": {"file_data": base64.b64encode(b"text").decode()}},
        "documents": {"type": "document", "source": {"type": "base64", "data": small}},
        "names": {"type": "image_url", "image_url": None, "uuid": "a"},
        "videos": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    }
    for name, part in parts.items():
        for count in (65, 1_000, 10_000):
            yield Medium("many", f"{count} {name}", partial(repeated, part, count))


def _fields() -> Iterator[Medium]:
    details: list[Any] = [5, "highest", [], {}]
    urls: list[Any] = [
        *("", "data:", "data:image/png;base64,", "data:image/png;base64,%%%%", "data:image/png,abc", "data:;base64,é"),
        *("ftp://a/b", "file:///etc/passwd", "file://localhost/proc/self/environ", "javascript:alert(1)", "//a/b"),
        *(5, [], {}, True, {"url": None}, {"url": 5}, {"url": []}),
        *({"url": "data:image/png;base64,AAAA", "detail": detail} for detail in details),
        *("data:image/png;base64," + "A" * (30 << 20), "x" * (1 << 20), "data:" + "a" * (1 << 20)),
    ]
    for number, url in enumerate(urls):
        yield Medium("field", f"image_url {number}", partial(repeated, {"type": "image_url", "image_url": url}))
        yield Medium("field", f"input_image {number}", partial(repeated, {"type": "input_image", "image_url": url}))
    values: list[Any] = [None, 5, [], {}, {"file_data": 5}, {"file_id": "f"}, {"file_data": "a", "file_url": "b"}]
    for number, value in enumerate(values):
        yield Medium("field", f"file {number}", partial(repeated, {"type": "file", "file": value}))
        yield Medium("field", f"source {number}", partial(repeated, {"type": "document", "source": value}))
    uuids: list[Any] = [5, "", "a" * 257, [], {}]
    for number, uuid in enumerate(uuids):
        yield Medium(
            "field", f"uuid {number}", partial(repeated, {"type": "image_url", "image_url": None, "uuid": uuid})
        )


def _urls(address: str) -> Iterator[Medium]:
    ways = [*REDIRECTS, "/endless", "/slow", "/silent", "/loop", "/404", "/500", "/packed", "/empty", "/html", "/cut"]
    names = ["localhost", "127.1", "2130706433", "0x7f000001", "017700000001", "0", "10.0.0.1", "192.168.1.1"]
    names += [
        "169.254.169.254",
        "172.16.0.1",
        "100.64.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[fd00::1]",
    ]
    names += ["user:pw@localhost", "localhost.", "LOCALHOST", "no-such-name.invalid", "127.0.0.1%2f@x"]
    for count in range(3):
        for part in ("image_url", "file"):
            for way in ways:
                make = partial(_url_part, part, f"http://{address}{way}?{count}")
                is_text = part == "file" and way in ("/empty", "/html")
                yield Medium("URL", f"{part} {way} {count}", make, may_be_read=is_text)
    for name in names:
        for scheme in ("http", "https"):
            for part in ("image_url", "file"):
                yield Medium("address", f"{part} {scheme} {name}", partial(_url_part, part, f"{scheme}://{name}/a.png"))


REDIRECTS = {
    "/to-localhost": "http://localhost:1/",
    "/to-private": "http://10.0.0.1/",
    "/to-metadata": "http://169.254.169.254/latest/meta-data/",
    "/to-file": "file:///etc/passwd",
    "/to-data": "data:image/png;base64,AAAA",
    "/to-nothing": "",
    "/to-ipv6": "http://[::1]:1/",
}


def _url_part(kind: str, url: str) -> list[Part]:
    if kind == "file":
        return [{"type": "input_file", "file_url": url}]
    return [{"type": "image_url", "image_url": {"url": url}}]


def _image_url(content: bytes, kind: str = "image/png") -> Part:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}


def repeated(part: Part, count: int = 1) -> list[Part]:
    return [dict(part) for _ in range(count)]


def _picture(make: Callable[[], bytes]) -> list[Part]:
    return [_image_url(make())]


def _pdf_file(make: Callable[[], bytes]) -> list[Part]:
    return [{"type": "file", "file": {"filename": "a", "file_data": base64.b64encode(make()).decode()}}]


@cache
def _ordinary(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (*_PICTURE, 3), np.uint8)
    return encoded(Image.fromarray(pixels), kind)


def _plain(size: tuple[int, int]) -> bytes:
    return encoded(Image.new("RGB", (size[1], size[0]), "red"), "PNG")


def _cut(kind: str, tenths: int) -> bytes:
    content = _ordinary(kind)
    return content[: len(content) * tenths // 10]


def _flipped(kind: str, seed: int) -> bytes:
    """A picture with other bytes in and behind its header."""
    content, numbers = bytearray(_ordinary(kind)), random.Random(seed)
    for _ in range(1 + seed):
        content[numbers.randrange(4, 400 if seed % 2 else len(content))] = numbers.randrange(256)
    return bytes(content)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(edge: int, depth: int, color: int) -> bytes:
    """A black picture, whose pixels are all there if it is within the limit."""
    channels = {0: 1, 2: 3, 3: 1, 6: 4}[color]
    row = bytes(1 + (edge * depth * channels + 7) // 8)
    packer = zlib.compressobj(1)
    rows = edge if edge <= 10_000 else 100
    packed = b"".join([*(packer.compress(row) for _ in range(rows)), packer.flush()])
    return _png_of(edge, edge, depth, color, _chunk(b"PLTE", bytes(6)) if color == 3 else b"", packed)


def _png_of(height: int, width: int, depth: int, color: int, chunks: bytes, packed: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunks + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _png_with(name: bytes, size: int) -> bytes:
    """A small picture beside a text or a profile that has `size` bytes when it is decompressed."""
    packer = zlib.compressobj(9)
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)), packer.flush()])
    content = {
        b"zTXt": b"a\0\0" + packed,
        b"iTXt": b"a\0\1\0\0\0" + packed,
        b"iCCP": b"a\0\0" + packed,
        b"eXIf": b"MM\0*\0\0\0\x08" + b"\xff\xff" + bytes(min(size, 1 << 20)),
        b"tEXt": b"a\0" + b"x" * min(size, 10 << 20),
    }[name]
    pixels = zlib.compress(b"\0" + bytes(8 * 3) + (b"\0" + bytes(8 * 3)) * 7)
    return _png_of(8, 8, 8, 2, _chunk(name, content), pixels)


def _bmp(edge: int) -> bytes:
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, edge, edge, 1, 24, 0, 0, 0, 0, 0, 0)
    return header + bytes(1000)


def _gif(edge: int) -> bytes:
    content = bytearray(_ordinary("GIF"))
    content[6:10] = struct.pack("<HH", edge, edge)
    return bytes(content)


def _tiff(edge: int) -> bytes:
    fields = [(256, 4, 1, edge), (257, 4, 1, edge), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    fields += [(277, 3, 1, 1), (278, 4, 1, edge), (279, 4, 1, 100)]
    entries = b"".join(struct.pack("<HHII", *entry) for entry in fields)
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(400)


def _jpeg(edge: int) -> bytes:
    content = bytearray(_ordinary("JPEG"))
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = struct.pack(">HH", edge, edge)
    return bytes(content)


def _webp(edge: int) -> bytes:
    size = (edge - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + size + size
    body = b"WEBP" + chunk + _ordinary("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _animation(kind: str, frames: int) -> bytes:
    images = [Image.new("RGB", (64, 64), (index % 256, index // 256, 0)) for index in range(frames)]
    return encoded(images[0], kind, save_all=True, append_images=images[1:])


def _drawing(operators: bytes, count: int) -> bytes:
    packed = stream(zlib.compress(operators * count, 1), b"/Filter /FlateDecode")
    return document([packed])


def _pages(count: int) -> bytes:
    return drawn(*[b"0 0 9 9 re f"] * count)


def chat_of(parts: Sequence[Part], model: str) -> dict[str, Any]:
    """The body of a chat with these parts."""
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}

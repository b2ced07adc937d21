"""Recognizes picture files by their first bytes."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF and AVIF"
_MAGIC: Mapping[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
# Brands of ISO base media files.
_AVIF = frozenset({b"avif", b"avis"})
_HEIF = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
# What is not read, by names that people know.
_UNREAD: Mapping[bytes, str] = {
    b"%PDF-": "PDF",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\1\0": "ICO",
    b"8BPS": "Photoshop",
}
_HEAD = 1024  # bytes in which an SVG file has its first tag
_BMP_COMPRESSION = slice(30, 34)
_UNCOMPRESSED = (0, 3, 6)  # BI_RGB, BI_BITFIELDS, BI_ALPHABITFIELDS
_CORE_HEADER = 12  # bytes of the oldest BMP header, which has no compression
_WEBP_WIDTH, _WEBP_HEIGHT = slice(24, 27), slice(27, 30)


def recognize(content: bytes) -> str | None:
    """Pillow's name of a file's format; None if it is not a supported one."""
    for magic, name in _MAGIC.items():
        if content.startswith(magic):
            return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    return "AVIF" if content[4:8] == b"ftyp" and content[8:12] in _AVIF else None


def unsupported_name(content: bytes) -> str | None:
    """The name of a format that is known, but not read; None for anything else."""
    for magic, name in _UNREAD.items():
        if content.startswith(magic):
            return name
    if content[4:8] == b"ftyp" and content[8:12] in _HEIF:
        return "HEIC"
    return "SVG" if b"<svg" in content[:_HEAD].lower() else None


def is_compressed_bmp(content: bytes) -> bool:
    """Whether a BMP file has run lengths, which Pillow takes minutes to read."""
    header = int.from_bytes(content[14:18], "little")
    return header != _CORE_HEADER and int.from_bytes(content[_BMP_COMPRESSION], "little") not in _UNCOMPRESSED


def webp_canvas(content: bytes) -> tuple[int, int] | None:
    """Height and width of the canvas of a WebP file that has one: Pillow makes it when it opens the file."""
    if content[12:16] != b"VP8X" or len(content) < _WEBP_HEIGHT.stop:
        return None
    height, width = (int.from_bytes(content[part], "little") + 1 for part in (_WEBP_HEIGHT, _WEBP_WIDTH))
    return height, width

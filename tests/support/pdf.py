"""Small PDF files, written by hand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf(*pages: str, extra: bytes = b"", size: tuple[int, int] = (300, 200)) -> bytes:
    """A file with a page for each text. `extra`: operators that are drawn on every page."""
    contents = [
        b"BT /F1 18 Tf 20 100 Td (%s) Tj ET\n%s" % (text.encode("latin-1"), extra) if text else extra for text in pages
    ]
    return document([stream(content) for content in contents], size=size)


def drawn(*pages: bytes, objects: Sequence[bytes] = (), resources: bytes = b"") -> bytes:
    """A file with a page for each content; `objects` follow, beginning with number 4."""
    return document([stream(content) for content in pages], objects=objects, resources=resources)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    """An object with a stream."""
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), entries, content)


def document(
    contents: Sequence[bytes],
    *,
    objects: Sequence[bytes] = (),
    resources: bytes = b"",
    size: tuple[int, int] = (300, 200),
) -> bytes:
    """A file whose pages have these content streams. The catalog, the pages and the font are objects 1, 2 and 3."""
    first = 4 + len(objects)
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(contents)))
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        *objects,
    ]
    for index, content in enumerate(contents):
        parts.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %d %d] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> %s >> >>" % (*size, first + 2 * index + 1, resources)
        )
        parts.append(content)
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, part in enumerate(parts, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(parts) + 1, start)
    return bytes(out)


def image_bomb(side: int = 30_000) -> bytes:
    """A page with a picture that has gigabytes when it is decompressed."""
    entries = b"/Type /XObject /Subtype /Image /Width %d /Height %d /ColorSpace /DeviceRGB /BitsPerComponent 8" % (
        side,
        side,
    )
    picture = stream(zlib.compress(bytes(1 << 20)), entries + b" /Filter /FlateDecode")
    return drawn(b"300 0 0 200 0 0 cm /X Do", objects=[picture], resources=b"/XObject << /X 4 0 R >>")


def stream_bomb(size: int = 1 << 28) -> bytes:
    """A page whose content is much larger when it is decompressed, twice."""
    packed = zlib.compress(zlib.compress(b"q Q " * (size // 4), 1))
    return document([stream(packed, b"/Filter [/FlateDecode /FlateDecode]")])

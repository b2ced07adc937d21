"""Video files in chats that must neither be read for long nor take much memory."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import repeat
from typing import Any

import av
import numpy as np
from PIL import Image

from benchmarks.hostile.media import REDIRECTS, Medium, Part, png, repeated
from tests.support.clips import sound_file, video_file
from tests.support.pictures import encoded

# Ordinary files: container and codec by FFmpeg's names, and whether all of a file is announced at its start or its
# end. What is left of the others when they are cut may be a shorter video.
_ORDINARY: dict[str, tuple[str, str, bool]] = {
    "MP4": ("mp4", "libx264", True),
    "MOV": ("mov", "mjpeg", True),
    "WebM": ("webm", "libvpx", False),
    "MKV": ("matroska", "mpeg4", False),
    "AVI": ("avi", "mpeg4", False),
    "TS": ("mpegts", "mpeg2video", False),
    "FLV": ("flv", "flv", False),
    "GIF": ("gif", "gif", False),
}
_PIXEL_FORMATS = {"mjpeg": "yuvj420p", "gif": "rgb8"}
_RATE = 25
_TICKS = 1000  # in a second
_SMALL = (64, 64)
_LARGEST = (1 << 32) - 1


def videos(address: str) -> list[Medium]:
    """All of them. `address`: of the `bad_web` that some are fetched from, with its port."""
    kinds = (_truncated, _damaged, _wrong_types, _sizes, _lengths, _numbers, _indices, _lists, _fields)
    return [*(medium for kind in kinds for medium in kind()), *_urls(address)]


def _truncated() -> Iterator[Medium]:
    for name, (_, _, is_announced) in _ORDINARY.items():
        for tenths in (1, 5, 9):
            yield _video("cut video", f"{name} {tenths}/10", partial(_cut, name, tenths), may_be_read=not is_announced)


def _damaged() -> Iterator[Medium]:
    for name in _ORDINARY:
        for seed in range(4):
            yield _video("bad video", f"{name} {seed}", partial(_flipped, name, seed), may_be_read=True)
    starts = {
        "MP4": b"\0\0\0\x18ftypmp42" + bytes(12),
        "MOV": b"\0\0\0\x08wide\0\x10\0\0moov",
        "MKV": b"\x1a\x45\xdf\xa3",
        "FLV": b"FLV\1\5\0\0\0\x09",
        "GIF": b"GIF89a\x40\0\x40\0\xf7\0\0",
        "AVI": b"RIFF\0\0\x10\0AVI LIST\0\0\x10\0hdrl",
    }
    for name, start in starts.items():
        yield _video("bad video", f"{name} of noise", partial(_noise, start))
        yield _video("bad video", f"{name} of zeros", partial(bytes.ljust, start, 1 << 20, b"\0"))
    yield _video("bad video", "TS of noise", _noisy_packets, may_be_read=True)


def _wrong_types() -> Iterator[Medium]:
    contents = {
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "list of files": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "session": b"v=0\r\nm=video 9 RTP/AVP 96\r\nc=IN IP4 127.0.0.1\r\na=rtpmap:96 H264/90000\r\n",
        "subtitles": b"1\n00:00:00,000 --> 00:00:09,000\ntext\n",
        "PNG": encoded(Image.new("RGB", _SMALL)),
        "PDF": b"%PDF-1.7\n" + bytes(100),
        "ZIP": b"PK\3\4" + bytes(100),
        "a program": b"\x7fELF" + bytes(100),
        "HTML": b"<html><video src='file:///etc/passwd'></html>",
        "zeros": bytes(1 << 20),
    }
    for name, content in contents.items():
        yield _video("no video", name, partial(bytes, content))
    yield _video("no video", "noise", _noise)
    yield _video("no video", "sound", sound_file)
    yield _video("no video", "a reference to a file", _with_reference, may_be_read=True)


def _sizes() -> Iterator[Medium]:
    """Frames of many pixels: the file says so, or they do."""
    for edge in (5_000, 20_000, 65_000):
        yield _video("video size", f"GIF of {edge}", partial(_gif, edge, 2))
        for container in ("mov", "matroska", "avi"):
            make = partial(_muxed, container, "mjpeg", partial(repeat, partial(_jpeg_that_says, edge), 4))
            yield _video("video size", f"JPEGs of {edge} in {container}", make)
        make = partial(_muxed, "mov", "png", partial(repeat, partial(png, min(edge, 20_000), 8, 2), 4))
        yield _video("video size", f"PNGs of {edge}", make)
        yield _video("video size", f"MP4 that says {edge}", partial(_mp4_that_says, edge), may_be_read=True)
    for edge in (5_000, 16_383):
        yield _video("video size", f"VP8 of {edge}", partial(_vp8_that_says, edge))
    growing = partial(_muxed, "mov", "mjpeg", lambda: [partial(_jpeg, _SMALL), partial(_jpeg, (3000, 3000))])
    yield _video("video size", "that grows", growing)
    for count, codec, make_frame, ticks in (
        (50, "mjpeg", _jpeg, 40),
        (600, "png", _plain, 40),
        (600, "png", _plain, 500),
    ):
        make = partial(_muxed, "mov", codec, partial(repeat, partial(make_frame, (4096, 2304)), count), ticks)
        name = f"video of {count} {codec} frames of 4096 x 2304, one in {ticks} ms"
        yield _video("large", name, make, may_be_read=ticks == _TICKS // _RATE)


def _lengths() -> Iterator[Medium]:
    for seconds in (60, 3_600, 20_000):
        for container in ("mov", "matroska"):
            frames = partial(repeat, partial(_jpeg, _SMALL), 3)
            make = partial(_muxed, container, "mjpeg", frames, seconds * _TICKS)
            yield _video("video length", f"{container}, {seconds} s between frames", make, may_be_read=True)
    for box, place in (("mvhd", 16), ("mdhd", 16), ("tkhd", 20), ("stts", 12)):
        make = partial(_patched, {box: (place, _LARGEST)})
        yield _video("video length", f"MP4 with a duration of years in {box}", make, may_be_read=True)


def _numbers() -> Iterator[Medium]:
    """Many frames, tracks or boxes."""
    for count in (10_000, 300_000, 2_000_000):
        yield _video("frames", f"GIF of {count}", partial(_gif, 16, count), may_be_read=count == 10_000)
    for count in (10_000, 150_000, 300_000):
        make = partial(_muxed, "mov", "png", partial(repeat, partial(_plain, (8, 8)), count), 1)
        yield _video("frames", f"mov of {count}", make, may_be_read=count < 300_000)
        make = partial(_muxed, "matroska", "vp8", partial(_repeated_last, "WebM", count), 1)
        yield _video("frames", f"matroska of {count}", make, may_be_read=count < 300_000)
    for container, codec, frames, count in (("flv", "flv1", "FLV", 300_000), ("mpegts", "mpeg2video", "TS", 200_000)):
        make = partial(_muxed, container, codec, partial(_repeated_last, frames, count), 1)
        yield _video("frames", f"{container} of {count}", make)
    for count in (100, 900):
        yield _video("tracks", f"MKV of {count}", partial(_many_tracks, count), may_be_read=True)
    for depth in (100, 1_000_000):
        yield _video("boxes", f"{depth} in each other", partial(_nested_boxes, depth))
    yield _video("boxes", "a million", lambda: _ordinary("MP4") + b"\0\0\0\x08free" * 1_000_000, may_be_read=True)


def _indices() -> Iterator[Medium]:
    """Indices that are longer than the file."""
    for count in (1_000_000, 20_000_000, 80_000_000, _LARGEST):
        yield _video("index", f"MOV of {count} frames", partial(_long_index, count))
    for claimed, megabytes in ((50, 50), (500, 500), (4_000, 1)):
        make = partial(_packed_index, claimed, megabytes)
        yield _video("index", f"of {claimed} MB, packed, with {megabytes} MB", make)


def _lists() -> Iterator[Medium]:
    """Lists of frames, each a picture."""
    small = encoded(Image.new("RGB", (8, 8)), "JPEG")
    lists: dict[str, Callable[[], list[bytes]]] = {
        **{f"{count} frames": partial(_copies, small, count) for count in (769, 10_000, 20_000)},
        "frames of two sizes": lambda: [small, _jpeg(_SMALL)],
        "a broken frame": lambda: [small, small[:50]],
        "an empty frame": lambda: [small, b""],
        "an SVG frame": lambda: [b"<svg></svg>"],
        "frames of 20000": lambda: [png(20_000, 8, 2)] * 2,
        "frames of 3000 that are cut": lambda: [_plain((3_000, 3_000))[:5000]] * 16,
        "videos": lambda: [_ordinary("MP4")] * 2,
    }
    for name, frames in lists.items():
        yield Medium("frame list", name, partial(_list_part, frames))
    yield Medium("frame list", "not base64", partial(_parts, "data:video/jpeg;base64,%%%%,%%%%"))
    yield Medium("frame list", "commas", partial(_parts, "data:video/jpeg;base64," + "," * (1 << 20)))


def _fields() -> Iterator[Medium]:
    values: list[Any] = [
        *("", "data:", "data:video/mp4;base64,", "data:video/mp4;base64,%%%%", "data:video/mp4,abc", "data:;base64,é"),
        *("file:///etc/passwd", "ftp://a/b", "rtsp://127.0.0.1/a", "concat:/etc/passwd|/etc/hosts", "pipe:0"),
        *(5, [], {}, True, {"url": None}, {"url": 5}, {"url": []}),
        "data:video/mp4;base64," + "A" * (50 << 20),
    ]
    for number, value in enumerate(values):
        for name in ("video_url", "input_video"):
            part = {"type": name, "video_url": value}
            yield Medium("video field", f"{name} {number}", partial(repeated, part))
    sources: list[Any] = [None, 5, [], {}, {"type": "base64"}, {"type": "url", "url": 5}, {"type": "file"}]
    for number, source in enumerate(sources):
        yield Medium("video field", f"source {number}", partial(repeated, {"type": "video", "source": source}))


def _urls(address: str) -> Iterator[Medium]:
    for way in (*REDIRECTS, "/endless", "/slow", "/silent", "/loop", "/404", "/empty", "/html", "/cut"):
        yield Medium("video URL", way, partial(_parts, f"http://{address}{way}?video"))


def _video(kind: str, name: str, make: Callable[[], bytes], *, may_be_read: bool = False) -> Medium:
    return Medium(kind, name, partial(_part_of, make), may_be_read)


def _part_of(make: Callable[[], bytes]) -> list[Part]:
    return _parts(f"data:video/mp4;base64,{base64.b64encode(make()).decode()}")


def _list_part(make: Callable[[], list[bytes]]) -> list[Part]:
    return _parts(f"data:video/jpeg;base64,{','.join(base64.b64encode(frame).decode() for frame in make())}")


def _parts(url: str) -> list[Part]:
    return [{"type": "video_url", "video_url": {"url": url}}]


def _copies(content: bytes, count: int) -> list[bytes]:
    return [content] * count


@cache
def _ordinary(name: str) -> bytes:
    container, codec, _ = _ORDINARY[name]
    return video_file(kind=container, codec=codec, pixel_format=_PIXEL_FORMATS.get(codec, "yuv420p"))


def _cut(name: str, tenths: int) -> bytes:
    content = _ordinary(name)
    return content[: len(content) * tenths // 10]


def _flipped(name: str, seed: int) -> bytes:
    """A video with other bytes in its first or last kilobyte, where indices are, or anywhere."""
    content, numbers = bytearray(_ordinary(name)), random.Random(seed)
    last = len(content) - 1
    first, end = ((12, 1000), (last - 1000, last), (12, last))[seed % 3]
    for _ in range(4 + 4 * seed):
        content[numbers.randrange(max(12, first), min(end, last))] = numbers.randrange(256)
    return bytes(content)


def _noise(start: bytes = b"") -> bytes:
    return start + random.Random(len(start)).randbytes(1 << 20)


def _noisy_packets() -> bytes:
    return b"".join(b"\x47" + random.Random(number).randbytes(187) for number in range(5000))


def _muxed(
    container: str, codec: str, frames: Callable[[], Iterable[Callable[[], bytes]]], ticks: int = _TICKS // _RATE
) -> bytes:
    """A file of frames that are encoded already. `ticks`: between two of them."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_mux_stream(codec, rate=_RATE, width=_SMALL[1], height=_SMALL[0])
        for index, make in enumerate(frames()):
            packet = av.Packet(make())
            packet.stream, packet.time_base = stream, Fraction(1, _TICKS)
            packet.pts = packet.dts = index * ticks
            packet.duration = ticks
            packet.is_keyframe = True
            output.mux(packet)
    return file.getvalue()


def _repeated_last(name: str, count: int) -> Iterator[Callable[[], bytes]]:
    """The frames of a file, the last of them again and again. The first one can be decoded without others."""
    with av.open(io.BytesIO(_ordinary(name)), "r") as container:
        frames = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    for index in range(count):
        yield partial(bytes, frames[min(index, len(frames) - 1)])


def _many_tracks(count: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        streams = [output.add_mux_stream("mjpeg", rate=_RATE, width=64, height=64) for _ in range(count)]
        for stream in streams:
            packet = av.Packet(_jpeg(_SMALL))
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, _TICKS), 0, 0
            packet.is_keyframe = True
            output.mux(packet)
    return file.getvalue()


@cache
def _jpeg(size: tuple[int, int]) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    return encoded(Image.fromarray(noise).resize(size), "JPEG")


@cache
def _plain(size: tuple[int, int]) -> bytes:
    return encoded(Image.new("RGB", size))


@cache
def _jpeg_that_says(edge: int) -> bytes:
    content = bytearray(_jpeg(_SMALL))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", edge, edge)
    return bytes(content)


def _vp8_that_says(edge: int) -> bytes:
    content = bytearray(_ordinary("WebM"))
    place = content.index(b"\x9d\x01\x2a") + 3  # the start of a key frame, then its size
    content[place : place + 4] = struct.pack("<HH", edge, edge)
    return bytes(content)


def _gif(edge: int, count: int) -> bytes:
    """An animation whose frames have a pixel each."""
    head = b"GIF89a" + struct.pack("<HHBBB", edge, edge, 0x80, 0, 0) + bytes(6)
    frame = b"\x21\xf9\x04\0\4\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0"
    return head + frame * count + b";"


def _box(content: bytes | bytearray, name: str) -> int:
    """The place behind the name of a box of an MP4 file."""
    return content.index(name.encode()) + 4


def _patched(values: dict[str, tuple[int, int]], content: bytes | None = None) -> bytes:
    """A file with other numbers of 32 bits in boxes, each at a place behind the name of its box."""
    patched = bytearray(_ordinary("MP4") if content is None else content)
    for name, (offset, value) in values.items():
        place = _box(patched, name) + offset
        patched[place : place + 4] = struct.pack(">I", value)
    return bytes(patched)


def _mp4_that_says(edge: int) -> bytes:
    size = edge << 16 | edge
    return _patched({"stsd": (40, size)})


def _long_index(count: int) -> bytes:
    """A file whose frames all have the same size, so that its index is three numbers."""
    content = _muxed("mov", "mjpeg", partial(repeat, partial(_jpeg, (16, 16)), 10))
    return _patched({"stsz": (8, count), "stts": (8, count), "stsc": (12, count)}, content)


def _packed_index(claimed: int, megabytes: int) -> bytes:
    """A file with a compressed index. `claimed`: its size as the file says it, in megabytes."""
    packer = zlib.compressobj(1)
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(megabytes)), packer.flush()])
    body = _boxed(b"cmvd", struct.pack(">I", claimed << 20) + packed)
    index = _boxed(b"moov", _boxed(b"cmov", _boxed(b"dcom", b"zlib") + body))
    return _boxed(b"ftyp", b"qt  " + bytes(8)) + index


def _boxed(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + name + content


def _nested_boxes(depth: int) -> bytes:
    heads = [struct.pack(">I", 8 * (depth - level)) + (b"trak" if level else b"moov") for level in range(depth)]
    return _boxed(b"ftyp", b"qt  " + bytes(8)) + b"".join(heads)


def _with_reference() -> bytes:
    """A file that says that its frames are in another one."""
    content = bytearray(_ordinary("MOV"))
    path = b"/etc/passwd"
    alias = bytearray(150)
    alias[10:38] = b"\x03etc".ljust(28, b"\0")
    alias += struct.pack(">HH", 2, len(path)) + path + b"\0" * (len(path) % 2) + struct.pack(">HH", 0xFFFF, 0)
    reference = _boxed(b"dref", bytes(4) + struct.pack(">I", 1) + _boxed(b"alis", bytes(4) + bytes(alias)))
    start = _box(content, "dref") - 8
    size = struct.unpack(">I", content[start : start + 4])[0]
    content[start : start + size] = reference
    for name in ("moov", "trak", "mdia", "minf", "dinf"):  # the boxes around it
        place = _box(content, name) - 8
        longer = struct.unpack(">I", content[place : place + 4])[0] + len(reference) - size
        content[place : place + 4] = struct.pack(">I", longer)
    return bytes(content)

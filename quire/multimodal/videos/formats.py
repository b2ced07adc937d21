"""Recognizes video files by their first bytes; and packs lists of frames, which are videos as well."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = "MP4, MOV, WebM, MKV, AVI, MPEG-TS, FLV and GIF"
# Names of FFmpeg's demuxers. They are never guessed: some of them open other files and addresses.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (4, b"free", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (0, b"FLV\1", "flv"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
)
# Brands of ISO base media files that are audio or pictures.
_NO_VIDEOS = frozenset({b"M4A ", b"M4B ", b"M4P ", b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"})
_TRANSPORT_PACKET, _SYNC = 188, 0x47
_FRAMES = b"quire frames\0"  # the beginning of a list of frames
_LENGTH = 8  # bytes of the length in front of each of them


def recognize(content: bytes) -> str | None:
    """The demuxer of a video file; None if it is not of a supported format."""
    for offset, magic, demuxer in _MAGIC:
        if content.startswith(magic, offset):
            return demuxer
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    syncs = content[: 3 * _TRANSPORT_PACKET : _TRANSPORT_PACKET]
    return "mpegts" if len(syncs) > 1 and all(byte == _SYNC for byte in syncs) else None


def is_video(content: bytes) -> bool:
    """Whether a file of any kind is a video, or a list of frames."""
    if content[4:8] == b"ftyp" and content[8:12] in _NO_VIDEOS:
        return False
    return recognize(content) is not None or content.startswith(_FRAMES)


def packed(frames: Sequence[bytes]) -> bytes:
    """A list of frames, each a file of a picture, as one content."""
    parts = [part for frame in frames for part in (len(frame).to_bytes(_LENGTH, "little"), frame)]
    return b"".join([_FRAMES, *parts])


def unpacked(content: bytes) -> list[bytes] | None:
    """The frames of a list; None if the content is no list, or a broken one."""
    if not content.startswith(_FRAMES):
        return None
    frames = []
    position = len(_FRAMES)
    while position < len(content):
        start = position + _LENGTH
        position = start + int.from_bytes(content[position:start], "little")
        frames.append(content[start:position])
    return frames if position == len(content) else None

"""Counts the frames of video files whose headers do not say how many there are, without FFmpeg.

To read a packet with FFmpeg takes ten times as long as to skip one here, so files with too many frames are refused
sooner. Files of an unusual layout may seem to have fewer frames; their packets are counted when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice

import numpy as np

# Matroska: an element has an id, a size and a content. The first byte of an id or a size says how many bytes it has.
_LENGTHS = tuple(9 - first.bit_length() if first else 0 for first in range(256))
_SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xA3, 0xA0, 0xA1
_MASTERS = frozenset({b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75", b"\x16\x54\xae\x6b"})  # Segment, Cluster, Tracks
_TRACK, _TRACK_NUMBER, _TRACK_TYPE, _VIDEO = b"\xae", b"\xd7", b"\x83", b"\x01"
# FLV: a header says where tags begin; each has a header and its length behind it.
_FLV_OFFSET = slice(5, 9)
_FLV_HEADER, _FLV_LENGTH = 11, 4  # bytes
_FLV_TYPE, _FLV_VIDEO = 0x1F, 9
# MPEG-TS: packets of equal size. A mark is in the first one of each frame.
_TS_PACKET, _TS_SYNC, _TS_FIRST, _TS_ID = 188, 0x47, 0x40, 0x1F
# MP4: a box has a size, which includes both, and a name. Each fragment (moof) has a part for each track (traf), which
# names the track (tfhd) and has runs of samples (trun).
_BOX_HEADER, _LONG_BOX_HEADER = 8, 16  # bytes
_LONG_SIZE, _UNTIL_THE_END = 1, 0
_FRAGMENT, _TRACK_OF_FRAGMENT, _TRACK_HEADER, _RUN = b"moof", b"traf", b"tfhd", b"trun"
_WORD = 4  # bytes: a version with flags, or a number behind it
_ELEMENTS = 4  # that are read for each frame that is enough: those of sound, too


def frames_at_least(content: bytes, demuxer: str, stream: int, enough: int) -> int:
    """How many frames a video has at least, or headers of its stream.

    Args:
        content: the file.
        demuxer: FFmpeg's name of its format.
        stream: FFmpeg's id of the stream.
        enough: counting may end there.
    """
    count = _FORMATS.get(demuxer)
    return 0 if count is None else count(content, stream, enough)


def _matroska(content: bytes, stream: int, enough: int) -> int:
    """Blocks of the first video track. A block is in a cluster, alone or as the first element of a group."""
    track = b"\0"  # no block has it
    position = count = 0
    with suppress(IndexError):  # the end of the file
        for _ in range(_ELEMENTS * enough):
            kind = content[position]
            if kind in (_SIMPLE_BLOCK, _BLOCK_GROUP):
                first = content[position + 1]
                length = _LENGTHS[first]
                start = position + 1 + length
                size = first & 0x7F if length == 1 else _size(content, position + 1, length)
                position = start + size
                if kind == _BLOCK_GROUP and content[start] == _BLOCK:
                    start += 1 + _LENGTHS[content[start + 1]]
                count += content.startswith(track, start)
                if count == enough:
                    break
                continue
            name, start, end = _element(content, position)
            if name == _TRACK and track == b"\0":
                track = _video_track(content, start, end) or track
            position = start if name in _MASTERS else end
    return count


def _element(content: bytes, position: int) -> tuple[bytes, int, int]:
    """The id of an element, and where its content starts and ends."""
    at = position + (_LENGTHS[content[position]] or len(content))  # an invalid one: as at the end of the file
    length = _LENGTHS[content[at]] or len(content)
    return content[position:at], at + length, at + length + _size(content, at, length)


def _size(content: bytes, position: int, length: int) -> int:
    return int.from_bytes(content[position : position + length]) & (1 << 7 * length) - 1


def _video_track(content: bytes, start: int, end: int) -> bytes | None:
    """What blocks of a track begin with; None if it is not a video, or has a number of several bytes."""
    fields = dict(_fields(content, start, min(end, len(content))))
    number = int.from_bytes(fields.get(_TRACK_NUMBER, b""))
    return bytes([0x80 | number]) if fields.get(_TRACK_TYPE) == _VIDEO and 0 < number < 0x80 else None


def _fields(content: bytes, position: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    while position < end:
        name, start, position = _element(content, position)
        yield name, content[start:position]


def _flv(content: bytes, stream: int, enough: int) -> int:
    """Tags with video."""
    position = int.from_bytes(content[_FLV_OFFSET]) + _FLV_LENGTH
    count = 0
    with suppress(IndexError):  # the end of the file
        for _ in range(_ELEMENTS * enough):
            count += content[position] & _FLV_TYPE == _FLV_VIDEO
            if count == enough:
                break
            position += _FLV_HEADER + int.from_bytes(content[position + 1 : position + 4]) + _FLV_LENGTH
    return count


def _mpegts(content: bytes, stream: int, enough: int) -> int:
    """First packets of frames."""
    packets = np.frombuffer(content, np.uint8)[: len(content) // _TS_PACKET * _TS_PACKET].reshape(-1, _TS_PACKET)
    has_sync, marks, low = packets[:, 0] == _TS_SYNC, packets[:, 1], packets[:, 2]
    is_of_stream = (marks & _TS_ID == stream >> 8) & (low == stream & 0xFF)
    return int(np.count_nonzero(has_sync & is_of_stream & (marks & _TS_FIRST > 0)))


def fragments_at_least(content: bytes, demuxer: str, enough: int) -> int:
    """How many fragments a file has at least; counting may end at `enough`. Formats but MP4 have none."""
    if demuxer != "mov":
        return 0
    boxes = islice(_boxes(content, frozenset()), _ELEMENTS * enough)
    return sum(1 for _ in islice((name for name, _ in boxes if name == _FRAGMENT), enough))


def _mov(content: bytes, stream: int, enough: int) -> int:
    """Samples of the stream in fragments; those of other files are in the header, which FFmpeg reads."""
    count, is_of_stream = 0, False
    for name, start in islice(_boxes(content, frozenset({_FRAGMENT, _TRACK_OF_FRAGMENT})), _ELEMENTS * enough):
        number = int.from_bytes(content[start + _WORD : start + 2 * _WORD])
        if name == _TRACK_HEADER:
            is_of_stream = number == stream
        elif name == _RUN and is_of_stream:
            count += number
            if count >= enough:
                return enough
    return count


def _boxes(content: bytes, masters: frozenset[bytes]) -> Iterator[tuple[bytes, int]]:
    """The names of the boxes of an MP4 file, and where their contents start; also of boxes in `masters`."""
    position = 0
    while position + _BOX_HEADER <= len(content):
        size = int.from_bytes(content[position : position + _WORD])
        name = content[position + _WORD : position + _BOX_HEADER]
        header = _BOX_HEADER
        if size == _LONG_SIZE:
            header = _LONG_BOX_HEADER
            size = int.from_bytes(content[position + _BOX_HEADER : position + header])
        yield name, position + header
        if size == _UNTIL_THE_END or size < header:
            return
        position += header if name in masters else size


_FORMATS: Mapping[str, Callable[[bytes, int, int], int]] = {
    "matroska": _matroska,
    "flv": _flv,
    "mpegts": _mpegts,
    "mov": _mov,
}

"""Completes headers that streaming writers have left unfinished: libsndfile reads no more than a header announces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.multimodal.audio.formats import id3_size

_UNKNOWN = 0x7FFF0000  # sizes of 32 bits from here on mean that the writer did not know the size
_UNKNOWN_64 = 1 << 62
_BITRATES = {  # of layer III, by whether the version is MPEG 1; kbit/s
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8000)}  # by version
_SYNC = re.compile(b"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xeb]")
_MONO = 3
_PADS = 2  # frames by which the count of a header may differ from that of the file
_ROOMY = {True: 5, False: 8}  # index of 64 kbit/s: a frame of this bitrate has room for a count of frames


def complete(content: bytes, name: str) -> bytes:
    """The file with lengths that its header leaves open, as far as they can be told from the file.

    Args:
        content: the file.
        name: `AudioFormat.name`.
    """
    match name:
        case "wav":
            return _complete_wav(content)
        case "au":
            size = content[8:12]
            return content[:8] + b"\xff" * 4 + content[12:] if size == bytes(4) else content
        case "caf":
            return _complete_caf(content)
        case "mp3":
            return _complete_mp3(content)
    return content


def is_chained(content: bytes) -> bool:
    """Return whether an ogg file has several streams, one after the other, as recordings of radio stations have."""
    began = position = 0
    first = True
    while content.startswith(b"OggS", position) and position + 27 <= len(content):
        begins = bool(content[position + 5] & 2)
        if begins and not first and position != began:
            return True
        count = content[position + 26]
        position += 27 + count + sum(content[position + 27 : position + 27 + count])
        if begins:
            began = position  # streams that begin together are one behind the other
        first = False
    return False


def wav_frames(content: bytes) -> int | None:
    """The frames that the header of a wav file announces; None if it does not."""
    align = 0
    long_size: int | None = None
    for chunk in _chunks(content):
        if chunk.name == b"ds64":
            long_size = int.from_bytes(content[chunk.start + 8 : chunk.start + 16], "little")
        if chunk.name == b"fmt ":
            align = int.from_bytes(content[chunk.start + 12 : chunk.start + 14], "little")
        if chunk.name == b"data":
            size = chunk.size if long_size is None or chunk.size < _UNKNOWN else long_size
            known = size < (_UNKNOWN if long_size is None else _UNKNOWN_64)
            return size // align if align and known else None
    return None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a wav file: `size` bytes, as it says, from `start` on."""

    name: bytes
    start: int
    size: int


def _chunks(content: bytes, position: int = 12) -> Iterator[_Chunk]:
    while position + 8 <= len(content):
        size = int.from_bytes(content[position + 4 : position + 8], "little")
        yield _Chunk(content[position : position + 4], position + 8, size)
        position += 8 + size + size % 2


def _complete_wav(content: bytes) -> bytes:
    """A file whose data chunk has no size gets that of what follows."""
    long_sizes = 0
    for chunk in _chunks(content):
        if chunk.name == b"ds64":
            long_sizes = chunk.start
        if chunk.name != b"data":
            continue
        size = chunk.size
        if long_sizes and size >= _UNKNOWN:
            size = int.from_bytes(content[long_sizes + 8 : long_sizes + 16], "little")
            unknown = not size or size >= _UNKNOWN_64
        else:
            unknown = not size and not _ends_with_chunks(content, chunk.start)
        if not unknown:
            return content
        there = min(len(content) - chunk.start, 0xFFFFFFFE)
        changed = bytearray(content)
        changed[:4] = b"RIFF"
        changed[4:8] = min(len(content) - 8, 0xFFFFFFFE).to_bytes(4, "little")
        if long_sizes:
            changed[long_sizes - 8 : long_sizes - 4] = b"JUNK"
        changed[chunk.start - 4 : chunk.start] = there.to_bytes(4, "little")
        return bytes(changed)
    return content


def _ends_with_chunks(content: bytes, start: int) -> bool:
    """Return whether what follows is other chunks, so that there is no audio."""
    end = start
    for chunk in _chunks(content, start):
        end = chunk.start + chunk.size
    return start < len(content) and len(content) - 1 <= end <= len(content)


def _complete_caf(content: bytes) -> bytes:
    position = 8
    while position + 12 <= len(content):
        name = content[position : position + 4]
        size = int.from_bytes(content[position + 4 : position + 12], "big", signed=True)
        start = position + 12
        if name == b"data" and size <= 0:
            return content[: position + 4] + (len(content) - start).to_bytes(8, "big") + content[start:]
        if size < 0:
            return content
        position = start + size
    return content


@dataclass(frozen=True, slots=True)
class _Mp3Header:
    """The header of a frame of layer III."""

    is_mpeg1: bool
    rate: int
    is_mono: bool
    size: int  # bytes of the frame

    @property
    def tag(self) -> int:
        """Where, in the first frame, the number of frames may be."""
        side_information = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}
        return 4 + side_information[self.is_mpeg1, self.is_mono]


def _complete_mp3(content: bytes) -> bytes:
    """A file that does not say how many frames it has, or fewer than it has, gets a Xing frame that does.

    Without it the length is guessed from the size of the first frame.
    """
    start = id3_size(content) if content.startswith(b"ID3") else 0
    first = _mp3_header(content, start)
    if first is None:
        return content
    announced = _announced_mp3_frames(content, start, first)
    audio = start if announced is None else start + first.size
    count = _count_mp3_frames(content, audio, first)
    if announced is not None and abs(announced - count) <= _PADS:
        return content
    head = bytearray(content[start : start + 4])
    head[1] |= 1  # without a checksum
    head[2] = _ROOMY[first.is_mpeg1] << 4 | head[2] & 0x0C
    frame = _mp3_header(bytes(head), 0)
    assert frame is not None
    info = bytes(head) + bytes(frame.tag - 4) + b"Xing" + (1).to_bytes(4, "big") + count.to_bytes(4, "big")
    return info.ljust(frame.size, b"\0") + content[audio:]


def _announced_mp3_frames(content: bytes, start: int, first: _Mp3Header) -> int | None:
    """The number in the first frame; 0 if it leaves it open, None if the first frame is audio."""
    xing = start + first.tag
    vbri = start + 36
    if content[xing : xing + 4] in (b"Xing", b"Info"):
        flags = int.from_bytes(content[xing + 4 : xing + 8], "big")
        return int.from_bytes(content[xing + 8 : xing + 12], "big") if flags & 1 else 0
    if content[vbri : vbri + 4] == b"VBRI":
        return int.from_bytes(content[vbri + 14 : vbri + 18], "big")
    return None


def _count_mp3_frames(content: bytes, position: int, first: _Mp3Header) -> int:
    count = 0
    while position < len(content):
        header = _mp3_header(content, position)
        if header is not None and header.rate == first.rate:
            count += 1
            position += header.size
            continue
        further = _SYNC.search(content, position + 1)  # behind a tag, or something broken
        if further is None:
            break
        position = further.start()
    return count


def _mp3_header(content: bytes, start: int) -> _Mp3Header | None:
    head = content[start : start + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version = head[1] >> 3 & 3
    bitrate = head[2] >> 4
    rate = head[2] >> 2 & 3
    if version == 1 or bitrate in (0, 15) or rate == 3:
        return None
    is_mpeg1 = version == 3
    hertz = _RATES[version][rate]
    size = (144 if is_mpeg1 else 72) * 1000 * _BITRATES[is_mpeg1][bitrate] // hertz + (head[2] >> 1 & 1)
    return _Mp3Header(is_mpeg1, hertz, head[3] >> 6 == _MONO, size)

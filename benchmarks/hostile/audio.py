"""Small files that become much audio."""

from __future__ import annotations

import io
import struct

import numpy as np
import soundfile

from benchmarks.hostile.body import Hostile

TRANSCRIPTIONS = "/v1/audio/transcriptions"
_HEADERS = {"content-type": "multipart/form-data; boundary=x"}
_MODEL = "quire-nano-hear"


def bodies() -> list[Hostile]:
    """All bodies of this kind."""
    return [
        Hostile("audio: a second, ordinary", TRANSCRIPTIONS, lambda: _form(_silence(1)), _HEADERS, control=True),
        Hostile("audio: an hour in 11 kB", TRANSCRIPTIONS, lambda: _form(_silence(3600)), _HEADERS),
        Hostile("audio: an hour that is not announced", TRANSCRIPTIONS, lambda: _form(_unannounced(3600)), _HEADERS),
        Hostile("audio: two hours in 22 kB", TRANSCRIPTIONS, lambda: _form(_silence(7200)), _HEADERS),
        Hostile("audio: 64 channels", TRANSCRIPTIONS, lambda: _form(_wav(64, 25_000_000)), _HEADERS),
    ]


def _form(file: bytes) -> bytes:
    disposition = b'Content-Disposition: form-data; name="%s"'
    model = b"--x\r\n" + disposition % b"model" + b"\r\n\r\n" + _MODEL.encode()
    content = b"--x\r\n" + disposition % b"file" + b'; filename="a"\r\n\r\n' + file
    return model + b"\r\n" + content + b"\r\n--x--\r\n"


def _silence(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * 1000, np.float32), 1000, format="FLAC")
    return file.getvalue()


def _unannounced(seconds: int) -> bytes:
    """A file that does not say how many samples it has."""
    content = bytearray(_silence(seconds))
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    return bytes(content)


def _wav(channels: int, size: int) -> bytes:
    rate, width = 1000, channels
    fields = (b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, channels, rate, rate * width, width, 8, b"data", size)
    return struct.pack("<4sI4s4sIHHIIHH4sI", *fields) + bytes(size)

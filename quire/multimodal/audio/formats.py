"""Which audio format a file has, by its first bytes. Names and media types that clients give are not trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAMES = "wav, flac, mp3, ogg (opus, vorbis), m4a, mp4, aac, webm, aiff, au, caf"
_FORMATS = frozenset({"wav", "flac", "mp3", "ogg", "mp4", "aac", "webm", "aiff", "au", "caf"})
# What clients call formats that are recognized under another name.
_ALIASES = {"m4a": "mp4", "opus": "ogg", "vorbis": "ogg", "oga": "ogg", "wave": "wav", "mpeg": "mp3"}
_ALIASES |= {"mpga": "mp3", "weba": "webm", "mkv": "webm", "aif": "aiff"}


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """A file format.

    Attributes:
        name: name in error texts.
        library: the library that decodes it.
        demuxer: name of FFmpeg's demuxer. It is never guessed: some of its demuxers open other files and addresses.
    """

    name: str
    library: Literal["soundfile", "av"]
    demuxer: str = ""


_WAV = AudioFormat("wav", "soundfile", "wav")
_MP3 = AudioFormat("mp3", "soundfile", "mp3")
_OGG = AudioFormat("ogg", "soundfile", "ogg")
_AAC = AudioFormat("aac", "av", "aac")
_MP4 = AudioFormat("mp4", "av", "mov")
_WEBM = AudioFormat("webm", "av", "matroska")
_MAGIC: tuple[tuple[int, bytes, AudioFormat], ...] = (
    (0, b"RF64", _WAV),
    (0, b"fLaC", AudioFormat("flac", "soundfile", "flac")),
    (0, b"OggS", _OGG),
    (0, b".snd", AudioFormat("au", "soundfile", "au")),
    (0, b"caff", AudioFormat("caf", "soundfile", "caf")),
    (4, b"ftyp", _MP4),
    (0, b"\x1a\x45\xdf\xa3", _WEBM),
)


def recognized_name(requested: str) -> str | None:
    """The `AudioFormat.name` of a format that a client names; None if it is not a known one."""
    name = requested.lower()
    name = _ALIASES.get(name, name)
    return name if name in _FORMATS else None


def recognize(content: bytes) -> AudioFormat | None:
    """The format of a file; None if it is not a known one."""
    for offset, magic, kind in _MAGIC:
        if content.startswith(magic, offset):
            return kind
    if content.startswith(b"RIFF") and content[8:12] == b"WAVE":
        return _WAV
    if content.startswith(b"FORM") and content[8:12] in (b"AIFF", b"AIFC"):
        return AudioFormat("aiff", "soundfile", "aiff")
    if content.startswith(b"ID3"):
        return _mpeg(content, id3_size(content)) or _MP3
    return _mpeg(content, 0)


def id3_size(content: bytes) -> int:
    """Bytes of the tag before the audio; seven bits of each byte count."""
    size = 0
    for byte in content[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _mpeg(content: bytes, start: int) -> AudioFormat | None:
    """MP3 or ADTS by the header of a frame; None if there is none."""
    header = content[start : start + 4]
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    if header[1] & 0xF6 == 0xF0:  # layer 0
        return _AAC
    layer, version = header[1] >> 1 & 3, header[1] >> 3 & 3
    bitrate = header[2] >> 4
    rate = header[2] >> 2 & 3
    return _MP3 if layer and version != 1 and bitrate != 15 and rate != 3 else None

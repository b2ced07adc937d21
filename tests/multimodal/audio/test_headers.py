"""Files whose writers could not go back and complete the header are read to their ends."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from quire.multimodal.audio import decode as decoding
from quire.multimodal.audio.decode import AudioError, decode
from quire.multimodal.audio.limits import AudioLimits
from tests.support.audio import RATE, Samples, encode, tone, wav

LIMITS = AudioLimits(size=4 << 20, seconds=60.0, decoded_size=64 << 20)
SECONDS = 2.0
UNKNOWN = (0, 0xFFFFFFFF)


@pytest.fixture(params=[True, False], ids=["with av", "without av"])
def _both_installations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(decoding, "find_spec", lambda name: None)


def seconds(content: bytes | bytearray) -> float:
    return decode(bytes(content), LIMITS).seconds


def written(container: str, subtype: str | None = None, samples: Samples | None = None, **options: Any) -> bytearray:
    file = io.BytesIO()
    source = tone(SECONDS) if samples is None else samples
    soundfile.write(file, source, RATE, format=container, subtype=subtype, **options)
    return bytearray(file.getvalue())


@pytest.mark.usefixtures("_both_installations")
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "ULAW", "IMA_ADPCM", "MS_ADPCM"])
def test_wav(subtype: str) -> None:
    content = written("WAV", subtype)
    whole, data, fact = seconds(content), content.index(b"data") + 4, content.find(b"fact") + 8
    for riff in (*UNKNOWN, None):
        for size in (*UNKNOWN, 0x7FFFF000, None):
            changed = bytearray(content)
            for place, value in ((4, riff), (data, size), (fact if fact > 8 else data, size)):
                if value is not None:
                    changed[place : place + 4] = struct.pack("<I", value)
            assert seconds(changed) == pytest.approx(whole, abs=0.05), (riff, size)


@pytest.mark.usefixtures("_both_installations")
def test_wav_with_a_chunk_before_the_audio() -> None:
    content = wav(tone(SECONDS))
    info = b"LIST" + struct.pack("<I", 4) + b"INFO"
    for size in UNKNOWN:
        assert seconds(content[:36] + info + b"data" + struct.pack("<I", size) + content[44:]) == SECONDS


@pytest.mark.usefixtures("_both_installations")
def test_wav_without_audio_is_refused_though_something_follows() -> None:
    content = wav(tone(SECONDS))[:40] + bytes(4)
    for chunk in (b"", b"LIST" + struct.pack("<I", 4) + b"INFO"):
        with pytest.raises(AudioError, match="no audio"):
            decode(content + chunk, LIMITS)


@pytest.mark.usefixtures("_both_installations")
def test_rf64() -> None:
    content = written("RF64", "PCM_16")
    sizes = content.index(b"ds64") + 8
    for filler in (b"\x00", b"\xff"):
        changed = bytearray(content)
        changed[sizes : sizes + 24] = filler * 24
        assert seconds(changed) == SECONDS
    with pytest.raises(AudioError, match="truncated"):
        decode(bytes(content[: len(content) // 2]), LIMITS)


@pytest.mark.usefixtures("_both_installations")
def test_au_caf_and_aiff() -> None:
    for value in UNKNOWN:
        au = written("AU", "PCM_16")
        au[8:12] = struct.pack(">I", value)
        assert seconds(au) == SECONDS
    for long in (-1, 0):
        caf = written("CAF", "PCM_16")
        at = caf.index(b"data") + 4
        caf[at : at + 8] = struct.pack(">q", long)
        assert seconds(caf) == SECONDS
    for value in UNKNOWN:
        aiff = written("AIFF", "PCM_16")
        for place in (4, aiff.index(b"COMM") + 10, aiff.index(b"SSND") + 4):
            aiff[place : place + 4] = struct.pack(">I", value)
        assert seconds(aiff) == SECONDS


@pytest.mark.usefixtures("_both_installations")
def test_flac_without_a_number_of_samples() -> None:
    content = written("FLAC")
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    assert seconds(content) == SECONDS
    with pytest.raises(AudioError):
        decode(bytes(content[: len(content) // 2]), LIMITS)


def fading() -> Samples:
    """Loud, then silent, so that the first frame of an mp3 file is larger than most."""
    noise = (np.random.default_rng(0).standard_normal((5 * RATE, 1)) * 0.3).astype(np.float32)
    return np.concatenate([noise, np.zeros_like(noise)])


@pytest.mark.usefixtures("_both_installations")
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_mp3_without_a_number_of_frames(rate: int) -> None:
    """No Xing frame, or one that was not completed; also behind an ID3 tag, and with one at the end."""
    file = io.BytesIO()
    samples = np.repeat(fading(), 1 + rate // RATE, axis=0)
    soundfile.write(file, samples, rate, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    content = bytearray(file.getvalue())
    whole, tag = seconds(content), content.index(b"Xing")
    start = content.index(content[:2], 4)
    open_count, no_count = bytearray(content), bytearray(content)
    open_count[tag + 8 : tag + 12] = bytes(4)
    no_count[tag + 4 : tag + 8] = bytes(4)
    id3 = b"ID3\x04\x00\x00" + bytes([0, 0, 2, 0]) + bytes(256)
    for changed in (content[start:], open_count, no_count, id3 + content[start:] + b"TAG" + bytes(125)):
        assert seconds(changed) == pytest.approx(whole, abs=0.15)
    assert seconds(content + content) == pytest.approx(2 * whole, abs=0.3)


def streamed(container: str, codec: str, **options: str) -> bytes:
    """A file of a writer that never goes back."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=RATE)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone(SECONDS).T), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
        for part in av.AudioResampler(stream.format.name, "mono", RATE).resample(frame):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov"}),
        ("mp4", "aac", {"movflags": "empty_moov+default_base_moof+frag_every_frame"}),
        ("webm", "libopus", {"live": "1"}),
        ("matroska", "flac", {"live": "1"}),
        ("adts", "aac", {}),
    ],
)
def test_fragmented_and_live_containers(container: str, codec: str, options: dict[str, str]) -> None:
    assert seconds(streamed(container, codec, **options)) == pytest.approx(SECONDS, abs=0.15)


def pages(content: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(content):
        count = content[position + 26]
        size = 27 + count + sum(content[position + 27 : position + 27 + count])
        yield content[position : position + size]
        position += size


@pytest.mark.parametrize("kind", ["opus", "vorbis"])
def test_ogg_that_has_no_end_or_several(kind: str) -> None:
    content = encode(tone(5.0), kind)
    *complete, last = pages(content)
    open_end = last[:5] + bytes([last[5] & ~4]) + last[6:22] + bytes(4) + last[26:]
    open_end = open_end[:22] + struct.pack("<I", checksum(open_end)) + open_end[26:]
    assert seconds(b"".join([*complete, open_end])) == pytest.approx(5.0, abs=0.1)
    assert seconds(content + content) == pytest.approx(10.0, abs=0.1)


def checksum(page: bytes) -> int:
    """The CRC of an ogg page."""
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)) & 0xFFFFFFFF
    return value

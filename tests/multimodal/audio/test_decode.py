"""Audio files of all formats are decoded; broken and hostile ones are refused with a reason."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from quire.multimodal.audio import decode as decoding
from quire.multimodal.audio.decode import AudioError, decode, decode_sound
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.limits import AudioLimits
from quire.multimodal.videos.formats import packed
from tests.support.audio import Samples, encode, tone, wav
from tests.support.clips import video_file

LIMITS = AudioLimits(size=4 << 20, seconds=20.0, decoded_size=64 << 20, video_size=4 << 20)
LOSSLESS = ("wav", "flac", "aiff", "au", "mkv")
LOSSY = ("mp3", "vorbis", "m4a", "aac")
OPUS = ("opus", "webm")  # at some rates only


def pitch(samples: Samples) -> float:
    """The loudest frequency."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    return float(np.abs(np.fft.rfft(middle)).argmax() * SAMPLE_RATE / len(middle))


def refusal(content: bytes, limits: AudioLimits = LIMITS) -> str:
    with pytest.raises(AudioError) as caught:
        decode(content, limits)
    assert caught.value.param == "file"
    return str(caught.value)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        *((kind, rate) for kind in LOSSLESS for rate in (8000, 16_000, 44_100)),
        *((kind, rate) for kind in LOSSY for rate in (16_000, 44_100)),
        *((kind, rate) for kind in OPUS for rate in (16_000, 48_000)),
    ],
)
def test_formats_rates_and_channels(kind: str, rate: int, channels: int) -> None:
    audio = decode(encode(tone(1.5, rate=rate, channels=channels), kind, rate=rate), LIMITS)
    assert audio.samples.dtype == np.float32
    assert audio.samples.ndim == 1
    assert audio.seconds == pytest.approx(1.5, abs=0.11)  # codecs pad
    assert pitch(audio.samples) == pytest.approx(440, abs=2)
    assert float(np.abs(audio.samples[4000:-4000]).max()) == pytest.approx(0.5, abs=0.05)
    if kind in LOSSLESS:
        assert len(audio.samples) == pytest.approx(1.5 * SAMPLE_RATE, abs=1)
        expected = tone(1.5)[:, 0]
        np.testing.assert_allclose(audio.samples[400:-400], expected[400 : len(audio.samples) - 400], atol=2e-3)


def test_channels_are_averaged() -> None:
    left, silent = tone(1.0), np.zeros((SAMPLE_RATE, 1), np.float32)
    audio = decode(wav(np.concatenate([left, silent], axis=1)), LIMITS)
    np.testing.assert_allclose(audio.samples, left[:, 0] / 2, atol=1e-4)


def test_a_name_is_not_needed_and_an_id3_tag_is_skipped() -> None:
    tag = b"ID3\x04\x00\x00" + bytes([0, 0, 2, 0]) + bytes(256)
    assert decode(tag + encode(tone(1.0), "mp3"), LIMITS).format == "mp3"
    assert decode(tag + encode(tone(1.0), "aac"), LIMITS).format == "aac"


def test_a_wav_file_of_unknown_length_is_read_to_its_end() -> None:
    content = bytearray(wav(tone(1.0)))
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"
    assert decode(bytes(content), LIMITS).seconds == 1.0


@pytest.mark.parametrize("content", [b"RIFF", b"hello, this is no audio", bytes(1000), b"%PDF-1.7\n" * 50, b"\xff\xff"])
def test_other_files_are_refused_with_the_supported_formats(content: bytes) -> None:
    message = refusal(content)
    assert message.startswith("Invalid or unsupported audio file.")
    assert "webm" in message


def test_an_empty_file_says_so() -> None:
    assert refusal(b"") == "The file is empty."


@pytest.mark.parametrize("kind", ["wav", "flac", "m4a", "aac", "webm", "mkv", "mp3", "vorbis", "opus", "aiff"])
def test_truncated_files_never_fail_otherwise(kind: str) -> None:
    content = encode(tone(2.0), kind)
    for cut in (*range(1, 64, 9), len(content) // 3, len(content) // 2, len(content) - 5):
        with suppress(AudioError):
            assert len(decode(content[:cut], LIMITS).samples) > 0


@pytest.mark.parametrize("kind", ["wav", "flac", "mkv"])
def test_a_file_that_lacks_its_end_is_refused(kind: str) -> None:
    content = encode(tone(4.0), kind)
    assert any(word in refusal(content[: len(content) // 2]) for word in ("truncated", "broken"))


@pytest.mark.parametrize("kind", ["wav", "flac", "m4a", "webm", "mp3", "vorbis", "aac"])
def test_flipped_bytes_never_fail_otherwise(kind: str) -> None:
    content = bytearray(encode(tone(1.0), kind))
    random = np.random.default_rng(len(kind))
    for _ in range(25):
        broken = bytearray(content)
        for place in random.integers(0, len(content), 12):
            broken[place] = int(random.integers(256))
        with suppress(AudioError):
            decode(bytes(broken), LIMITS)


def test_limits_on_bytes_seconds_and_decoded_size() -> None:
    content = wav(tone(3.0))
    assert "96044 bytes" in refusal(content, AudioLimits(96_000, 20.0, 1 << 30))
    assert "longer than 2 s" in refusal(content, AudioLimits(1 << 20, 2.0, 1 << 30))
    assert "more than 100000 bytes" in refusal(content, AudioLimits(1 << 20, 20.0, 100_000))
    assert decode(content, AudioLimits(96_044, 3.0, 192_000)).seconds == 3.0


def test_a_small_file_of_hours_is_refused_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 minutes of silence at 8 kHz are a few kilobytes as FLAC."""
    content = encode(np.zeros((30 * 60 * 8000, 1), np.float32), "flac", rate=8000)
    assert len(content) < 200_000
    read = []
    source = decoding._through_soundfile

    def counted(*arguments: object) -> decoding.Source:
        for block, rate in source(*arguments):  # type: ignore[arg-type]
            read.append(len(block))
            yield block, rate

    monkeypatch.setattr(decoding, "_through_soundfile", counted)
    assert "longer than 20 s" in refusal(content)
    assert sum(read) < 60 * 8000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda head: head.replace(struct.pack("<I", 16_000), struct.pack("<I", 4_000_000_000), 1), "wav file"),
        (lambda head: head.replace(struct.pack("<I", 16_000), struct.pack("<I", 1), 1), "samples per second"),
        (lambda head: head.replace(b"\x01\x00\x01\x00", b"\x01\x00\xff\x00", 1), "wav file"),
    ],
)
def test_absurd_headers_are_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    content = wav(tone(1.0))
    changed = change(content)
    assert changed != content
    assert reason in refusal(changed)


def test_samples_that_are_not_numbers_are_refused() -> None:
    content = encode(np.full((1000, 1), np.nan, np.float32), "wav")
    assert decode(content, LIMITS).seconds > 0  # 16-bit samples have no NaN
    fields = (b"RIFF", 4036, b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32, b"data", 4000)
    header = struct.pack("<4sI4s4sIHHIIHH4sI", *fields)
    assert "not finite" in refusal(header + np.full(1000, np.inf, "<f4").tobytes())


def test_a_playlist_is_not_followed() -> None:
    """FFmpeg would guess these formats, and open what they name."""
    assert "Invalid or unsupported" in refusal(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
    assert "Invalid or unsupported" in refusal(b"ffconcat version 1.0\nfile /etc/passwd\n")


def test_a_video_without_sound_is_refused() -> None:
    content = zlib.compress(b"")  # something that is no audio inside a known container
    assert "webm file" in refusal(b"\x1a\x45\xdf\xa3" + content)
    assert "mp4 file" in refusal(b"\x00\x00\x00\x18ftypisom" + bytes(40))


@pytest.mark.parametrize(
    ("kind", "codec", "sound_codec"),
    [("mp4", "libx264", "aac"), ("webm", "libvpx", "libopus"), ("mpegts", "libx264", "aac"), ("avi", "mpeg4", "mp3")],
)
def test_the_sound_of_videos(kind: str, codec: str, sound_codec: str) -> None:
    """Which may end before their frames."""
    content = video_file(20, kind=kind, codec=codec, sound=1.2, sound_codec=sound_codec)
    audio = decode_sound(content, LIMITS)
    assert audio.seconds == pytest.approx(1.2, abs=0.08)
    assert pitch(audio.samples) == pytest.approx(440, abs=3)


def test_silent_videos() -> None:
    for content in (video_file(5), video_file(5, kind="gif", codec="gif", pixel_format="rgb8"), packed([b"frame"])):
        assert decode_sound(content, LIMITS).seconds == 0


def test_videos_whose_sound_is_refused() -> None:
    film = video_file(20, sound=1.2)
    for content, limits, reason in (
        (b"noise", LIMITS, "not a video of a supported format"),
        (film, replace(LIMITS, seconds=0.5), "--max-audio-seconds"),
        (film, replace(LIMITS, video_size=1000), "--max-video-size"),
        (film[: len(film) // 2], LIMITS, "broken"),
    ):
        with pytest.raises(AudioError, match=reason):
            decode_sound(content, limits)


def test_errors_cross_the_border_of_a_process() -> None:
    error = pickle.loads(pickle.dumps(AudioError("no audio")))  # noqa: S301 our own
    assert (type(error), str(error), error.param) == (AudioError, "no audio", "file")

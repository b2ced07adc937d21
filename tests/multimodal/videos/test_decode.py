"""Video files: the frames that were chosen are decoded, whatever the format; what is broken is refused."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.engine.client.pictures import VideoInfo
from quire.multimodal.videos import decode
from quire.multimodal.videos.decode import InspectVideo, PrepareVideo, VideoError, inspect, prepare
from quire.multimodal.videos.formats import packed, unpacked
from quire.multimodal.videos.layout import VideoHeader
from quire.multimodal.videos.limits import VideoLimits
from tests.support.clips import FORMATS, STEP, sound_file, video_file, watching
from tests.support.pictures import drawn, encoded

LIMITS = VideoLimits(1 << 22, 1 << 16, 16)


def read(content: bytes, info: VideoInfo, limits: VideoLimits = LIMITS) -> tuple[VideoHeader, Any]:
    header = inspect(InspectVideo(content, info), limits)
    return header, prepare(PrepareVideo(content, header, info), limits)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    header, pixels = read(video_file(**FORMATS[name]), watching())
    assert (header.frames, header.fps, header.duration, header.chosen) == (30, 10.0, 3.0, (0, 6, 12, 18, 24))
    assert pixels.shape == (5, 48, 64, 3)
    expected = np.array(header.chosen) * STEP
    assert np.abs(pixels[:, 40, 60, 0].astype(int) - expected).max() < 8
    assert np.abs(pixels[:, 8, 8, 0].astype(int) - 255 + expected).max() < 8


@pytest.mark.parametrize("name", ["mp4", "vp9", "mpegts"])
def test_frames_that_are_far_apart_are_the_same_as_when_all_are_decoded(name: str) -> None:
    """What lies between is skipped."""
    content = video_file(90, **FORMATS[name])
    header, pixels = read(content, watching(3))
    _, every = read(content, watching(90), VideoLimits(1 << 22, 1 << 16, 90))
    assert header.chosen == (0, 30, 60)
    np.testing.assert_array_equal(pixels, every[list(header.chosen)])


def test_turned_videos_are_the_right_way_up() -> None:
    """As those of telephones: the file says how they are to be turned."""
    header, pixels = read(video_file(4, rotation=90), watching(4, (64, 48)))
    assert (header.height, header.width) == (64, 48)
    assert pixels[0, 60, 4, 0] > 200 > pixels[0, 4, 4, 0]  # the bright corner has moved from the top to the bottom


def test_animations() -> None:
    content = video_file(12, kind="gif", codec="gif", pixel_format="rgb8")
    header, pixels = read(content, watching(3))
    assert header.chosen == (0, 4, 8)
    assert pixels[0, 40, 60, 0] < pixels[1, 40, 60, 0] < pixels[2, 40, 60, 0]


def test_lists_of_frames_are_read_whole() -> None:
    frames = [drawn(40, 60, seed=seed) for seed in range(7)]
    content = packed([encoded(frame) for frame in frames])
    header, pixels = read(content, watching(2, (40, 60)))
    assert (header.frames, header.fps, header.duration, header.chosen) == (7, 24.0, None, tuple(range(7)))
    np.testing.assert_array_equal(pixels, np.stack([np.asarray(frame) for frame in frames]))
    assert inspect(InspectVideo(content, watching(), 2.0), LIMITS).times[-1] == 3.0


def one_frame_of(seconds: float) -> bytes:
    """A file with a frame, whose header announces many."""
    content = bytearray(video_file(1, kind="matroska"))
    place = content.index(b"\x44\x89\x88") + 3  # the duration in milliseconds
    content[place : place + 8] = struct.pack(">d", 1000 * seconds)
    return bytes(content)


def huge(content: bytes, edge: int) -> bytes:
    """An MP4 file whose headers announce frames of another size."""
    changed = bytearray(content)
    entry = changed.index(b"avc1") + 28
    changed[entry : entry + 4] = struct.pack(">HH", edge, edge)
    return bytes(changed)


def huge_frames() -> bytes:
    """A file with small frames by its headers, whose frames say that they have 20,000 x 20,000 pixels."""
    content = bytearray(video_file(4, kind="mov", codec="mjpeg", pixel_format="yuvj420p"))
    frames = [place for place in range(len(content)) if content[place : place + 2] == b"\xff\xc0"]
    for place in frames:
        content[place + 5 : place + 9] = struct.pack(">HH", 20_000, 20_000)
    return bytes(content)


VIDEO = video_file()
PNG = encoded(drawn(40, 60))
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "The file is empty"),
    "a picture": (PNG, "not a video of a supported format: MP4, MOV, WebM"),
    "text": (b"a video", "not a video of a supported format"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video of a supported format"),
    "audio": (sound_file(), "has no video stream"),
    "without an index": (VIDEO[: len(VIDEO) // 2], "broken or truncated"),
    "half of it": (video_file(60, options={"movflags": "faststart"}, size=(200, 200))[:3000], "truncated"),
    "half of a stream": (video_file(60, kind="matroska")[:900], "broken or truncated|has no frames|truncated"),
    "a header alone": (b"\0\0\0\x18ftypisom" + b"x" * 1000, "broken or truncated"),
    "an hour of one frame": (one_frame_of(3600), "truncated: it has 0.1 s of 3600.0 s"),
    "large frames": (video_file(2, size=(400, 400)), "has 400 x 400 pixels"),
    "huge frames": (huge_frames(), "broken or truncated: Invalid"),
    "noise in it": (VIDEO[:600] + bytes(range(256)) * 4 + VIDEO[1624:], "broken|truncated"),
    "many bytes": (VIDEO + b"\0" * (1 << 22), "--max-video-size"),
    "no frames": (packed([]), "has no frames"),
    "frames of sizes": (packed([PNG, encoded(drawn(41, 60))]), "must have the same size"),
    "a frame that is none": (packed([PNG, b"noise"]), "Frame 2 of the video: The file is not a picture"),
    "a broken frame": (packed([PNG, PNG[:200]]), "Frame 2 of the video: The PNG file is broken"),
    "a large frame": (packed([encoded(Image.new("RGB", (300, 300)))]), "300 x 300 pixels"),
    "many frames": (packed([PNG] * 17), "has 17 frames; this server reads 16"),
    "a broken list": (packed([PNG])[:-1], "not a video of a supported format"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    content, text = BROKEN[name]
    with pytest.raises(VideoError, match=text):
        read(content, watching(16))


def test_a_stream_without_a_unit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(time_base=None, codec_context=SimpleNamespace())
    container = SimpleNamespace(streams=SimpleNamespace(video=[stream]))
    monkeypatch.setattr("av.open", lambda *_, **__: nullcontext(container))
    with pytest.raises(VideoError, match="has no unit of time"):
        read(VIDEO, watching())


def test_the_stream_is_believed_rather_than_the_file_around_it() -> None:
    header, _ = read(huge(VIDEO, 20_000), watching())
    assert (header.height, header.width) == (48, 64)


def test_rates_that_are_not_those_of_the_frames() -> None:
    """Recorders write a thousand; what counts is when the frames are."""
    content = video_file(20, kind="matroska")
    place = content.index(b"\x23\xe3\x83\x84") + 4  # the duration of a frame in nanoseconds
    changed = content[:place] + (1_000_000).to_bytes(4, "big") + content[place + 4 :]
    header, _ = read(changed, watching())
    assert (header.frames, round(header.fps, 1)) == (20, 10.0)


def test_more_frames_than_the_server_reads() -> None:
    with pytest.raises(VideoError, match="17 frames of the video would be read; this server reads 16"):
        read(VIDEO, watching(17))


def test_what_would_take_too_long_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames before the last key frame are not decoded, and each that is read costs as much as several."""
    content = video_file(60, key_interval=10, size=(128, 128), kind="webm", codec="libvpx")
    frame = 128 * 128
    for count, decoded in ((2, 2), (3, 3), (5, 1 + 3 + 5 + 7 + 9)):
        work = frame * (decoded + 4 * count)
        monkeypatch.setattr(decode, "_MOST_DECODED", work)
        assert len(inspect(InspectVideo(content, watching(count)), LIMITS).chosen) == count
        monkeypatch.setattr(decode, "_MOST_DECODED", work - 1)
        with pytest.raises(VideoError, match=f"{count} frames of 128 x 128 pixels are read, for which {decoded} are"):
            inspect(InspectVideo(content, watching(count)), LIMITS)
    frames = packed([encoded(drawn(128, 128))] * 3)
    monkeypatch.setattr(decode, "_MOST_DECODED", 15 * frame - 1)
    with pytest.raises(VideoError, match="3 frames of 128 x 128 pixels are read, for which 3 are decoded"):
        inspect(InspectVideo(frames, watching()), LIMITS)


def test_lists_are_packed() -> None:
    assert unpacked(packed([b"a", b"", b"ccc"])) == [b"a", b"", b"ccc"]
    assert unpacked(b"a") is None


def test_without_av(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setattr(decode, "find_spec", lambda _: None)
    with pytest.raises(VideoError, match=r"pip install 'quire\[video\]'"):
        read(VIDEO, watching())

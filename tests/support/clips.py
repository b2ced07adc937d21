"""Video files for tests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np

from quire.engine.client.pictures import FixedSize, FrameSampling, VideoInfo

_RATE, _BLOCK = 48_000, 960  # samples in a second, and of a frame of sound
STEP = 8  # by which frames get brighter
FORMATS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mov": {"kind": "mov", "codec": "mpeg4"},
    "fragmented": {"options": {"movflags": "frag_keyframe+empty_moov"}},
    "vp8": {"kind": "webm", "codec": "libvpx"},
    "vp9": {"kind": "webm", "codec": "libvpx-vp9"},
    "mkv": {"kind": "matroska"},
    "avi": {"kind": "avi", "codec": "mpeg4"},
    "mpegts": {"kind": "mpegts"},
    "flv": {"kind": "flv", "codec": "flv1"},
}


def watching(frames: int = 5, size: tuple[int, int] = (48, 64)) -> VideoInfo:
    """A model that reads so many frames."""
    return VideoInfo(
        placeholder=1,
        placeholder_text="<video>",
        geometry=FixedSize(height=size[0], width=size[1], tokens=4),
        sampling=FrameSampling(rule="uniform", num_frames=frames),
    )


def video_file(
    count: int = 30,
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    fps: int = 10,
    size: tuple[int, int] = (48, 64),
    key_interval: int = 8,
    pixel_format: str = "yuv420p",
    rotation: int = 0,
    options: dict[str, str] | None = None,
    sound: float = 0.0,
    sound_codec: str = "aac",
) -> bytes:
    """A video that gets brighter; its upper left quarter gets darker.

    Args:
        count: number of frames.
        kind: format, by FFmpeg's name.
        codec: codec, by FFmpeg's name.
        fps: frames in a second.
        size: height and width.
        key_interval: frames from which decoding can begin.
        pixel_format: pixel format, by FFmpeg's name.
        rotation: degrees by which players turn it counterclockwise.
        options: of the format.
        sound: seconds of a tone; 0: the video is silent.
        sound_codec: its codec, by FFmpeg's name.
    """
    height, width = size
    with TemporaryDirectory() as folder:  # to move an index to the start, FFmpeg reads the file again
        path = Path(folder, "video")
        with av.open(str(path), "w", format=kind, options=options or {}) as container:
            stream: Any = container.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, pixel_format, key_interval
            if rotation:
                stream.set_display_rotation(rotation)
            heard: Any = container.add_stream(sound_codec, rate=_RATE) if sound else None
            for index in range(count):
                pixels = np.full((height, width, 3), index * STEP % 256, np.uint8)
                pixels[: height // 2, : width // 2] = 255 - index * STEP % 256
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
            if heard is not None:
                for frame in _tone(sound):
                    container.mux(heard.encode(frame))
                container.mux(heard.encode())
        return path.read_bytes()


def _tone(seconds: float) -> Iterator[av.AudioFrame]:
    samples = 0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * _RATE)) / _RATE)
    for start in range(0, len(samples), _BLOCK):
        block = np.ascontiguousarray(samples[None, start : start + _BLOCK], np.float32)
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = _RATE, start
        yield frame


def sound_file() -> bytes:
    """An MP4 file with audio alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()

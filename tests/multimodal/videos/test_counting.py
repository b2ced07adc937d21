"""Frames are counted before packets are read, so that a video with too many is refused soon."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.multimodal.videos import decode
from quire.multimodal.videos.counting import frames_at_least
from quire.multimodal.videos.decode import InspectVideo, VideoError, inspect
from quire.multimodal.videos.limits import VideoLimits
from tests.support.clips import FORMATS, video_file, watching

FRAMES = 30
LIMITS = VideoLimits(1 << 22, 1 << 16, 16)
COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "webm": ("matroska", FORMATS["vp8"]),
    "mkv": ("matroska", FORMATS["mkv"]),
    "mkv with sound": ("matroska", {**FORMATS["mkv"], "sound": 1.0}),
    "live mkv": ("matroska", {**FORMATS["mkv"], "options": {"live": "1"}}),  # of elements without a size
    "flv": ("flv", FORMATS["flv"]),
    "flv with sound": ("flv", {**FORMATS["flv"], "sound": 1.0}),
    "mpegts": ("mpegts", FORMATS["mpegts"]),
    "mpegts with sound": ("mpegts", {**FORMATS["mpegts"], "sound": 1.0}),
}
MOVFLAGS = "frag_every_frame+empty_moov+default_base_moof"
FRAGMENTED: dict[str, dict[str, Any]] = {
    "one frame each": {"options": {"movflags": MOVFLAGS}},
    "one frame each, with sound": {"options": {"movflags": MOVFLAGS}, "sound": 1.0},
    "several frames each": FORMATS["fragmented"],
}
COUNTED |= {f"mp4, {name}": ("mov", options) for name, options in FRAGMENTED.items()}
PACKET_ID = 0x100  # FFmpeg's first one in MPEG-TS


@cache
def file_of(name: str) -> bytes:
    return video_file(FRAMES, **COUNTED[name][1])


@pytest.mark.parametrize("name", COUNTED)
def test_frames_of_the_video_alone_count(name: str) -> None:
    demuxer, content = COUNTED[name][0], file_of(name)
    stream = 1 if demuxer == "mov" else PACKET_ID
    assert frames_at_least(content, demuxer, stream, 1000) == FRAMES
    enough = FRAMES if demuxer != "mov" else 5 * FRAMES  # of MP4, four boxes are read for each
    assert frames_at_least(content, demuxer, stream, enough) == FRAMES
    assert 0 < frames_at_least(content[: len(content) // 2], demuxer, stream, 1000) < FRAMES


@pytest.mark.parametrize("name", FORMATS)
def test_too_many_frames_are_refused_in_every_format(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    job = InspectVideo(video_file(FRAMES, **FORMATS[name]), watching())
    monkeypatch.setattr(decode, "_MOST_FRAMES", FRAMES)
    assert inspect(job, LIMITS).frames == FRAMES
    monkeypatch.setattr(decode, "_MOST_FRAMES", FRAMES - 1)
    with pytest.raises(VideoError, match=f"more than {FRAMES - 1} frames"):
        inspect(job, LIMITS)


def test_frames_that_only_packets_show_are_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "frames_at_least", lambda *_: 0)
    monkeypatch.setattr(decode, "_MOST_FRAMES", FRAMES - 1)
    with pytest.raises(VideoError, match="more than"):
        inspect(InspectVideo(video_file(FRAMES, **FORMATS["vp8"]), watching()), LIMITS)


def test_too_many_fragments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = InspectVideo(file_of("mp4, one frame each"), watching())
    monkeypatch.setattr(decode, "_MOST_FRAGMENTS", FRAMES)
    assert inspect(job, LIMITS).frames == FRAMES
    monkeypatch.setattr(decode, "_MOST_FRAGMENTS", FRAMES - 1)
    with pytest.raises(VideoError, match=f"more than {FRAMES - 1} fragments.*longer ones, or not fragmented"):
        inspect(job, LIMITS)
    assert inspect(InspectVideo(file_of("mp4, several frames each"), watching()), LIMITS).frames == FRAMES


def test_boxes_of_64_bits_and_without_an_end_are_counted() -> None:
    content = file_of("mp4, one frame each")
    long = (1).to_bytes(4) + b"free" + (20).to_bytes(8) + b"long"
    assert frames_at_least(content[:28] + long + content[28:], "mov", 1, 1000) == FRAMES
    assert frames_at_least(content + bytes(4) + b"mdat" + content, "mov", 1, 1000) == FRAMES


@given(data=st.data(), name=st.sampled_from(sorted(COUNTED)))
@settings(deadline=None, max_examples=200)
def test_files_that_are_damaged_are_counted_to_some_end(data: st.DataObject, name: str) -> None:
    demuxer = COUNTED[name][0]
    content = bytearray(file_of(name))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=20)):
        content[place] = data.draw(st.sampled_from([0, 1, 0x80, 0xA0, 0xA3, 0xFF]))
    stream = 1 if demuxer == "mov" else PACKET_ID
    assert frames_at_least(bytes(content), demuxer, stream, 1000) <= 1000

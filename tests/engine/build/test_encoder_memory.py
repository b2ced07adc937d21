"""The memory that encoders of items take."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.build.encoder_memory import item_tokens, largest_frames, largest_picture, max_item_tokens
from quire.engine.client.pictures import (
    MAX_RATIO,
    FrameSampling,
    Geometry,
    PatchRows,
    PictureInfo,
    SmartResize,
    VideoInfo,
)
from quire.multimodal.pictures.layout import layout
from quire.multimodal.videos.layout import VideoHeader, video_layout

_ROOM = 1 << 20
GEOMETRIES: list[Geometry] = [
    SmartResize(multiple=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    SmartResize(multiple=28, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 24, frames=2, enlarges=True),
    SmartResize(multiple=32, min_pixels=32 * 32 * 9, max_pixels=32 * 32 * 9),
    PatchRows(patch=28, longest_edge=1540),
    PatchRows(patch=14, longest_edge=75),
]


@given(geometry=st.sampled_from(GEOMETRIES), height=st.integers(1, 6000), width=st.integers(1, 6000))
@settings(max_examples=100, deadline=None)
def test_no_picture_has_more_tokens_than_memory_is_reserved_for(geometry: Geometry, height: int, width: int) -> None:
    height, width = max(height, math.ceil(width / MAX_RATIO)), max(width, math.ceil(height / MAX_RATIO))
    info = PictureInfo(placeholder=1, placeholder_text="<image>", geometry=geometry)
    (item,) = layout(info, height, width).items
    assert item.length <= item_tokens(geometry, _ROOM)
    if isinstance(geometry, SmartResize):
        largest = largest_picture(geometry, _ROOM)
        assert item.size <= largest.pixels.nbytes * 1.5  # its edges are whole tokens


@given(
    geometry=st.sampled_from([geometry for geometry in GEOMETRIES if isinstance(geometry, SmartResize)]),
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    frames=st.integers(1, 9),
    shares_area=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_frames_have_more_tokens_than_memory_is_reserved_for(
    geometry: SmartResize, height: int, width: int, frames: int, *, shares_area: bool
) -> None:
    height, width = max(height, math.ceil(width / MAX_RATIO)), max(width, math.ceil(height / MAX_RATIO))
    video = VideoInfo(
        placeholder=2,
        placeholder_text="<video>",
        geometry=geometry,
        sampling=FrameSampling(rule="uniform"),
        group=2,
        shares_area=shares_area,
    )
    info = PictureInfo(
        placeholder=1,
        placeholder_text="<image>",
        geometry=SmartResize(multiple=28, min_pixels=784, max_pixels=784),
        video=video,
    )
    header = VideoHeader(frames=frames, fps=1, duration=None, height=height, width=width, chosen=tuple(range(frames)))
    largest = largest_frames(video, _ROOM)
    for item in video_layout(video, header).items:
        assert item.length <= max_item_tokens(info, _ROOM)
        assert item.size <= largest.pixels.nbytes * 1.5  # its edges are whole tokens


def test_room_bounds_the_largest_picture() -> None:
    smart = GEOMETRIES[0]
    assert item_tokens(smart, 50) == 50
    assert largest_picture(smart, 50).pixels.shape == (1, 7 * 28, 7 * 28, 3)

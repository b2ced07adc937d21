"""Settings of pictures, by the names of transformers, for each geometry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.client.pictures import (
    CanvasTiles,
    FixedSize,
    FrameSampling,
    Geometry,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
    TokenBudget,
    VideoInfo,
    VideoSound,
)
from quire.multimodal.errors import PromptError
from quire.multimodal.picture_settings import (
    background_color,
    frame_rate,
    with_frame_settings,
    with_low_detail,
    with_settings,
)

SMART = SmartResize(multiple=28, min_pixels=784, max_pixels=10_000)
SPLIT = SplitTiles(tile=14, longest_edge=56, tokens=4)
ROWS = PatchRows(patch=14, longest_edge=140)
GRID = GridTiles(height=14, width=14, tokens=4)
SCAN = PanAndScan(height=14, width=14, tokens=4)
BUDGET = TokenBudget(multiple=48, max_tokens=280, largest=560)
CANVAS = CanvasTiles(tile=14, tokens=4)
FIXED = FixedSize(height=14, width=14, tokens=4)


def changed(geometry: Geometry, settings: dict[str, Any]) -> Geometry:
    info = PictureInfo(placeholder=1, placeholder_text="<image>", geometry=geometry)
    return with_settings(info, settings).geometry


@pytest.mark.parametrize(
    ("geometry", "settings", "fields"),
    [
        (SMART, {"max_pixels": 2000}, {"max_pixels": 2000}),
        (SMART, {"size": {"shortest_edge": 900, "longest_edge": 9000}}, {"min_pixels": 900, "max_pixels": 9000}),
        (SMART, {"max_pixels": 2000, "images_kwargs": {"max_pixels": 3000}}, {"max_pixels": 3000}),
        (SMART, {"videos_kwargs": {}, "images_kwargs": {}}, {}),
        (SPLIT, {"do_image_splitting": False}, {"splits": False}),
        (SPLIT, {"size": {"longest_edge": 28}}, {"longest_edge": 28}),
        (ROWS, {"size": {"longest_edge": 28}}, {"longest_edge": 28}),
        (GRID, {"min_patches": 2, "max_patches": 6}, {"min_tiles": 2, "max_tiles": 6}),
        (SCAN, {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}, {"splits": True, "max_crops": 2}),
        (SCAN, {"pan_and_scan_min_crop_size": 100}, {"min_crop": 100}),
        (BUDGET, {"max_soft_tokens": 560}, {"max_tokens": 560}),
        (CANVAS, {"max_patches": 4, "resize_to_max_canvas": True}, {"max_tiles": 4, "enlarges": True}),
        (FIXED, {}, {}),
    ],
)
def test_what_settings_change(geometry: Geometry, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    expected = {name: fields.get(name, getattr(geometry, name)) for name in type(geometry).__struct_fields__}
    result = changed(geometry, settings)
    assert type(result) is type(geometry)
    assert {name: getattr(result, name) for name in type(result).__struct_fields__} == expected


@pytest.mark.parametrize(
    ("geometry", "settings", "reason"),
    [
        (
            SMART,
            {"num_crops": 4},
            "`mm_processor_kwargs.num_crops` is not supported for this model; supported are min_p",
        ),
        (FIXED, {"max_pixels": 4}, "no settings"),
        (SMART, {"max_pixels": 100}, "min_pixels must be at most max_pixels"),
        (BUDGET, {"max_soft_tokens": 1120}, "must be one of 70, 140, 280, 560"),
        (BUDGET, {"max_soft_tokens": 70.0}, "must be one of 70"),
        (CANVAS, {"max_patches": 65}, "from 1 to 64"),
        (SMART, {"max_pixels": "many"}, "a whole number"),
        (SMART, {"max_pixels": True}, "a whole number"),
        (SMART, {"max_pixels": 1 << 40}, "a whole number"),
        (SMART, {"size": {"height": 5}}, "an object with shortest_edge and longest_edge"),
        (SMART, {"size": 5}, "an object with"),
        (SMART, {"size": {"longest_edge": -1}}, "`mm_processor_kwargs.size.longest_edge` must be"),
        (SMART, {"images_kwargs": 5}, "must be an object"),
        (SMART, {"videos_kwargs": {"fps": 2}}, "the model reads no videos"),
        (SMART, {"audio_kwargs": {"a": 2}}, "only pictures and videos have settings"),
        (SPLIT, {"do_image_splitting": 1}, "true or false"),
        (GRID, {"max_patches": 10_000}, "from 1 to 64"),
        (GRID, {"min_patches": 13}, "min_patches must be at most max_patches"),
    ],
)
def test_settings_that_are_refused(geometry: Geometry, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError) as caught:
        changed(geometry, settings)
    assert reason in str(caught.value)
    assert caught.value.param.startswith("mm_processor_kwargs")


@pytest.mark.parametrize(
    ("geometry", "low"),
    [
        (SmartResize(multiple=28, min_pixels=784, max_pixels=1 << 24, frames=2), {"max_pixels": 2 * 512 * 512}),
        (SMART, {}),
        (SPLIT, {"splits": False}),
        (PatchRows(patch=14, longest_edge=1540), {"longest_edge": 512}),
        (GRID, {"min_tiles": 1, "max_tiles": 1}),
        (PanAndScan(height=14, width=14, tokens=4, splits=True), {"splits": False}),
        (PaddedTiles(tile=28, patches=2, max_tiles=9), {"max_tiles": 1}),
        (BUDGET, {"max_tokens": 70}),
        (CANVAS, {"max_tiles": 1}),
        (FIXED, {}),
    ],
)
def test_low_detail_is_the_smallest_form(geometry: Geometry, low: dict[str, Any]) -> None:
    info = PictureInfo(placeholder=1, placeholder_text="<image>", geometry=geometry)
    expected = msgspec.structs.replace(geometry, **low)
    assert with_low_detail(info).geometry == expected


def test_the_color_behind_transparent_pictures() -> None:
    assert background_color({}, (1, 2, 3)) == (1, 2, 3)
    assert background_color({"image": {}, "video": {}}, (1, 2, 3)) == (1, 2, 3)
    assert background_color({"image": {"rgba_background_color": [0, 9, 255]}}, (1, 2, 3)) == (0, 9, 255)


@pytest.mark.parametrize(
    "settings",
    [
        {"audio": {"sampling_rate": 3}},
        {"image": {"mode": "RGB"}},
        {"image": 5},
        {"image": {"rgba_background_color": [0, 0]}},
        {"image": {"rgba_background_color": [0, 0, 256]}},
        {"image": {"rgba_background_color": [0, 0, True]}},
        {"image": {"rgba_background_color": "white"}},
    ],
)
def test_other_settings_of_files_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as caught:
        background_color(settings, (1, 2, 3))
    assert caught.value.param.startswith("media_io_kwargs")


QWEN = FrameSampling(rule="qwen2_vl", fps=2.0, min_frames=4, max_frames=768)
SMOL = FrameSampling(rule="smolvlm", fps=1.0, num_frames=64)
GLM = FrameSampling(rule="glm46v", fps=2.0)


def _info(sampling: FrameSampling, *, shares_area: bool = False) -> PictureInfo:
    video = VideoInfo(
        placeholder=2,
        placeholder_text="<video>",
        geometry=SmartResize(multiple=28, min_pixels=5000, max_pixels=20_000),
        sampling=sampling,
        shares_area=shares_area,
    )
    return PictureInfo(placeholder=1, placeholder_text="<image>", geometry=SMART, video=video)


def _video(info: PictureInfo) -> tuple[FrameSampling, int, int]:
    assert info.video is not None
    geometry = info.video.geometry
    assert isinstance(geometry, SmartResize)
    return info.video.sampling, geometry.min_pixels, geometry.max_pixels


def test_settings_of_videos() -> None:
    """Those that have no scope count for pictures as well."""
    info = _info(QWEN)
    sampling, least, most = _video(with_settings(info, {"fps": 4, "max_frames": 9, "max_pixels": 3000}))
    assert (sampling.fps, sampling.max_frames, least, most) == (4, 9, 3000, 3000)
    shared = with_settings(_info(QWEN, shares_area=True), {"max_pixels": 3000})
    assert _video(shared)[1:] == (5000, 20_000)
    assert shared.geometry == SmartResize(multiple=28, min_pixels=784, max_pixels=3000)
    scoped = with_settings(info, {"num_frames": 3, "videos_kwargs": {"num_frames": 5, "max_pixels": 9000}})
    assert _video(scoped) == (FrameSampling(rule="qwen2_vl", fps=2.0, num_frames=5, min_frames=4), 5000, 9000)
    assert scoped.geometry == SMART


def test_the_sound_of_videos() -> None:
    """It is asked for with the names of vLLM and of transformers, of models that hear it."""
    info = _info(QWEN)
    assert info.video is not None
    sound = VideoSound(part=50, token="<a>", before="", after="")
    hears = msgspec.structs.replace(info, video=msgspec.structs.replace(info.video, sound=sound))
    settings: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"use_audio_in_video": True, "fps": 4}, True),
        ({"load_audio_from_video": True}, True),
        ({"videos_kwargs": {"use_audio_in_video": True}}, True),
        ({"use_audio_in_video": True, "videos_kwargs": {"use_audio_in_video": False}}, False),
    ]
    for setting, is_heard in settings:
        video = with_settings(hears, setting).video
        assert video is not None
        assert video.sound == msgspec.structs.replace(sound, is_heard=is_heard)
    for model, setting in ((info, {"use_audio_in_video": True}), (hears, {"load_audio_from_video": "yes"})):
        with pytest.raises(PromptError, match=r"mm_processor_kwargs\.(use|load)_audio"):
            with_settings(model, setting)


def test_settings_of_decoding_videos() -> None:
    for sampling, values, expected in (
        (QWEN, {"fps": 0.5}, (0.5, None, 768)),
        (QWEN, {"num_frames": 8}, (2.0, 8, 768)),
        (QWEN, {"num_frames": -1}, (2.0, None, 768)),
        (QWEN, {"num_frames": 8, "fps": 1}, (1, None, 8)),
        (SMOL, {"num_frames": 8, "fps": 2}, (2, 8, 768)),
        (SMOL, {"fps": 2}, (2, 64, 768)),
    ):
        changed_sampling, *_ = _video(with_frame_settings(_info(sampling), {"video": values}))
        assert (changed_sampling.fps, changed_sampling.num_frames, changed_sampling.max_frames) == expected
    # GLM-4.6V chooses the frames of files by itself, but the rate of a list of frames is not known otherwise.
    listed = with_frame_settings(_info(GLM), {"video": {"fps": 2}}, are_lists=True)
    assert _video(listed)[0] == GLM
    with pytest.raises(PromptError, match="above 0"):
        with_frame_settings(_info(GLM), {"video": {"fps": -2}}, are_lists=True)
    assert frame_rate({"video": {"fps": 2}}) == 2
    assert frame_rate({}) is None


@pytest.mark.parametrize(
    ("sampling", "settings", "reason"),
    [
        (QWEN, {"video": {"fps": 0}}, "above 0"),
        (QWEN, {"video": {"fps": 1000}}, "at most 240"),
        (QWEN, {"video": {"num_frames": 0}}, "from 1 to 16384"),
        (QWEN, {"video": {"height": 4}}, "supported are fps, num_frames"),
        (QWEN, {"video": [4]}, "must be an object"),
        (GLM, {"video": {"fps": 2}}, "not supported for this model"),
    ],
)
def test_settings_of_decoding_videos_that_are_refused(
    sampling: FrameSampling, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PromptError, match=reason):
        with_frame_settings(_info(sampling), settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fps": 1, "num_frames": 4}, "only one of `fps` and `num_frames`"),
        ({"min_frames": 20, "max_frames": 4}, "min_frames must be at most max_frames"),
        ({"videos_kwargs": {"max_pixels": 10}}, "min_pixels must be at most max_pixels"),
        ({"videos_kwargs": {"crop": 10}}, "supported are fps, num_frames, min_frames, max_frames, min_pixels"),
    ],
)
def test_settings_of_videos_that_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        with_settings(_info(QWEN), settings)

"""Settings of pictures, by the names of transformers, for each geometry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.client.pictures import (
    FixedSize,
    Geometry,
    GridTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
)
from quire.multimodal.errors import PromptError
from quire.multimodal.picture_settings import background_color, with_low_detail, with_settings

SMART = SmartResize(multiple=28, min_pixels=784, max_pixels=10_000)
SPLIT = SplitTiles(tile=14, longest_edge=56, tokens=4)
ROWS = PatchRows(patch=14, longest_edge=140)
GRID = GridTiles(height=14, width=14, tokens=4)
SCAN = PanAndScan(height=14, width=14, tokens=4)
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
        (SMART, {"max_pixels": "many"}, "a whole number"),
        (SMART, {"max_pixels": True}, "a whole number"),
        (SMART, {"max_pixels": 1 << 40}, "a whole number"),
        (SMART, {"size": {"height": 5}}, "an object with shortest_edge and longest_edge"),
        (SMART, {"size": 5}, "an object with"),
        (SMART, {"size": {"longest_edge": -1}}, "`mm_processor_kwargs.size.longest_edge` must be"),
        (SMART, {"images_kwargs": 5}, "must be an object"),
        (SMART, {"videos_kwargs": {"fps": 2}}, "only pictures have settings"),
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
        {"video": {"num_frames": 3}},
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

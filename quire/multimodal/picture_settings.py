"""Settings of pictures that an operator or a request may change: `mm_processor_kwargs` and `media_io_kwargs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.engine.client.pictures import (
    Color,
    Geometry,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
)
from quire.multimodal.errors import PromptError

PROCESSOR, MEDIA_IO = "mm_processor_kwargs", "media_io_kwargs"
_SCOPE = "images_kwargs"  # of settings of pictures alone, in the processors of transformers
_OTHER_SCOPES = ("text_kwargs", "videos_kwargs", "audio_kwargs")
_MAX_TILES = 64  # of a picture: choosing their grid takes time that is quadratic in it
_MAX_PIXELS = 1 << 30
_MAX_EDGE = 1 << 15
_LOW_EDGE = 512  # of pictures of low detail, as OpenAI's models see them
_Changes = dict[str, Any]


def with_settings(info: PictureInfo, settings: Mapping[str, Any]) -> PictureInfo:
    """The facts about a model with other settings of its processor, by the names of transformers.

    Args:
        info: facts about the model.
        settings: the names and values, or those in `images_kwargs`, which come before.

    Raises:
        PromptError: a setting is not one of this model, or its value is not valid.
    """
    values = {name: value for name, value in settings.items() if name != _SCOPE and name not in _OTHER_SCOPES}
    scoped = settings.get(_SCOPE) or {}
    if not isinstance(scoped, Mapping):
        raise PromptError(f"`{PROCESSOR}.{_SCOPE}` must be an object.", f"{PROCESSOR}.{_SCOPE}")
    for scope in _OTHER_SCOPES:
        if settings.get(scope):
            raise PromptError(f"`{PROCESSOR}.{scope}` is not supported: only pictures have settings.", PROCESSOR)
    changes = _Changes()
    for name, value in {**values, **scoped}.items():
        changes |= _changes(info.geometry, name, value)
    return msgspec.structs.replace(info, geometry=_checked(msgspec.structs.replace(info.geometry, **changes)))


def with_low_detail(info: PictureInfo) -> PictureInfo:
    """The facts about a model that gets the smallest form of pictures that it knows; the same if it knows one only."""
    changes = _Changes()
    match info.geometry:
        case SmartResize(min_pixels=least, max_pixels=most, frames=frames):
            changes = {"max_pixels": max(least, min(most, frames * _LOW_EDGE**2))}
        case PatchRows(longest_edge=longest):
            changes = {"longest_edge": min(longest, _LOW_EDGE)}
        case SplitTiles() | PanAndScan():
            changes = {"splits": False}
        case GridTiles():
            changes = {"min_tiles": 1, "max_tiles": 1}
    return msgspec.structs.replace(info, geometry=msgspec.structs.replace(info.geometry, **changes))


def background_color(settings: Mapping[str, Any], default: Color) -> Color:
    """The colour behind transparent pictures, of `media_io_kwargs`.

    Raises:
        PromptError: there is another setting, or its value is not valid.
    """
    for kind, values in settings.items():
        if values and (kind != "image" or not isinstance(values, Mapping) or set(values) != {"rgba_background_color"}):
            raise PromptError(f"`{MEDIA_IO}` supports only `image.rgba_background_color`.", f"{MEDIA_IO}.{kind[:100]}")
    color = (settings.get("image") or {}).get("rgba_background_color")
    if color is None:
        return default
    if not isinstance(color, list | tuple) or [type(part) for part in color] != [int] * 3 or not _are_bytes(color):
        raise PromptError(
            f"`{MEDIA_IO}.image.rgba_background_color` must be three numbers from 0 to 255.", f"{MEDIA_IO}.image"
        )
    red, green, blue = color
    return red, green, blue


def _are_bytes(color: list[int] | tuple[int, ...]) -> bool:
    return all(0 <= part <= 255 for part in color)


def _changes(geometry: Geometry, name: str, value: Any) -> _Changes:
    """The fields of a geometry that a setting changes."""
    known: Mapping[str, Callable[[str, Any], _Changes]]
    match geometry:
        case SmartResize():
            known = {
                "min_pixels": _number("min_pixels", _MAX_PIXELS),
                "max_pixels": _number("max_pixels", _MAX_PIXELS),
                "size": _size({"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}, _MAX_PIXELS),
            }
        case SplitTiles():
            known = {
                "do_image_splitting": _switch("splits"),
                "size": _size({"longest_edge": "longest_edge"}, _MAX_EDGE),
            }
        case PatchRows():
            known = {"size": _size({"longest_edge": "longest_edge"}, _MAX_EDGE)}
        case GridTiles():
            known = {
                "min_patches": _number("min_tiles", _MAX_TILES),
                "max_patches": _number("max_tiles", _MAX_TILES),
            }
        case PaddedTiles():
            known = {"dynamic_hd": _number("max_tiles", _MAX_TILES)}
        case PanAndScan():
            known = {
                "do_pan_and_scan": _switch("splits"),
                "pan_and_scan_min_crop_size": _number("min_crop", _MAX_EDGE),
                "pan_and_scan_max_num_crops": _number("max_crops", _MAX_TILES),
            }
        case _:
            known = {}
    if name not in known:
        supported = f"; supported are {', '.join(known)}" if known else ", which has no settings of pictures"
        raise PromptError(
            f"`{PROCESSOR}.{name[:100]}` is not supported for this model{supported}.", f"{PROCESSOR}.{name[:100]}"
        )
    return known[name](name, value)


def _number(field: str, most: int) -> Callable[[str, Any], _Changes]:
    def change(name: str, value: Any) -> _Changes:
        if type(value) is not int or not 0 < value <= most:
            raise PromptError(f"`{PROCESSOR}.{name}` must be a whole number from 1 to {most}.", f"{PROCESSOR}.{name}")
        return {field: value}

    return change


def _switch(field: str) -> Callable[[str, Any], _Changes]:
    def change(name: str, value: Any) -> _Changes:
        if not isinstance(value, bool):
            raise PromptError(f"`{PROCESSOR}.{name}` must be true or false.", f"{PROCESSOR}.{name}")
        return {field: value}

    return change


def _size(fields: Mapping[str, str], most: int) -> Callable[[str, Any], _Changes]:
    def change(name: str, value: Any) -> _Changes:
        if not isinstance(value, Mapping) or not value or not set(value) <= set(fields):
            raise PromptError(
                f"`{PROCESSOR}.{name}` must be an object with {' and '.join(fields)}.", f"{PROCESSOR}.{name}"
            )
        changes = _Changes()
        for key, number in value.items():
            changes |= _number(fields[key], most)(f"{name}.{key}", number)
        return changes

    return change


def _checked(geometry: Geometry) -> Geometry:
    """A geometry whose bounds are in order."""
    match geometry:
        case SmartResize(min_pixels=least, max_pixels=most) if least > most:
            raise PromptError(f"`{PROCESSOR}`: min_pixels must be at most max_pixels, {most}.", PROCESSOR)
        case GridTiles(min_tiles=least, max_tiles=most) if least > most:
            raise PromptError(f"`{PROCESSOR}`: min_patches must be at most max_patches, {most}.", PROCESSOR)
    return geometry

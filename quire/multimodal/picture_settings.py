"""Settings of pictures and videos, which operators and requests change: `mm_processor_kwargs` and `media_io_kwargs`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from quire.engine.client.pictures import (
    MAX_TILES,
    TOKEN_BUDGETS,
    CanvasTiles,
    Color,
    FrameGeometry,
    FrameSampling,
    Geometry,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SamplingRule,
    SmartResize,
    SplitTiles,
    TokenBudget,
    VideoInfo,
    VideoSound,
)
from quire.multimodal.errors import PromptError

PROCESSOR, MEDIA_IO = "mm_processor_kwargs", "media_io_kwargs"
# Of settings of pictures or videos alone, in the processors of transformers.
_PICTURES, _VIDEOS = "images_kwargs", "videos_kwargs"
_OTHER_SCOPES = ("text_kwargs", "audio_kwargs")
_SCOPES = (_PICTURES, _VIDEOS, *_OTHER_SCOPES)
_RATE = ("fps", "num_frames")
_SOUND = ("use_audio_in_video", "load_audio_from_video")  # two names of one setting
# Settings of which frames are read that have an effect, by the rule.
_OF_FRAMES: Mapping[SamplingRule, tuple[str, ...]] = {
    "uniform": _RATE,
    "qwen2_vl": (*_RATE, "min_frames", "max_frames"),
    "qwen3_vl": (*_RATE, "min_frames", "max_frames"),
    "glm4v": ("fps",),
    "glm46v": (),
    "internvl": _RATE,
    "smolvlm": _RATE,
}
_MAX_RATE = 240  # frames in a second
_MAX_FRAMES = 1 << 14
_MAX_PIXELS = 1 << 30
_MAX_EDGE = 1 << 15
_LOW_EDGE = 512  # of pictures of low detail, as OpenAI's models see them
_Changes = dict[str, Any]


def with_settings(info: PictureInfo, settings: Mapping[str, Any]) -> PictureInfo:
    """The facts about a model with other settings of its processor, by the names of transformers.

    Args:
        info: facts about the model.
        settings: the names and values, or those in `images_kwargs` and `videos_kwargs`, which come before.

    Raises:
        PromptError: a setting is not one of this model, or its value is not valid.
    """
    for scope in _OTHER_SCOPES:
        if settings.get(scope):
            raise PromptError(
                f"`{PROCESSOR}.{scope}` is not supported: only pictures and videos have settings.", PROCESSOR
            )
    video = info.video
    if video is not None and video.sound is not None:
        settings, video = _with_sound(settings, video, video.sound)
    shared = {name: value for name, value in settings.items() if name not in _SCOPES}
    frames_only = () if video is None else _OF_FRAMES[video.sampling.rule]
    of_pictures = {name: value for name, value in shared.items() if name not in frames_only}
    geometry = _changed(info.geometry, {**of_pictures, **_scoped(settings, _PICTURES)})
    if video is not None:
        # An area that all frames have together is not to be compared with that of a picture.
        known = frames_only if video.shares_area else (*frames_only, *_known_of_frames(video.geometry))
        of_videos = {name: value for name, value in shared.items() if name in known}
        video = _with_video_settings(_bounded(video, of_videos), {**of_videos, **_scoped(settings, _VIDEOS)})
    elif settings.get(_VIDEOS):
        raise PromptError(f"`{PROCESSOR}.{_VIDEOS}` is not supported: the model reads no videos.", PROCESSOR)
    return msgspec.structs.replace(info, geometry=geometry, video=video)


def _with_sound(
    settings: Mapping[str, Any], video: VideoInfo, sound: VideoSound
) -> tuple[Mapping[str, Any], VideoInfo]:
    """The settings without those of the sound of videos, and how videos are read with these."""
    of_videos = _scoped(settings, _VIDEOS)
    for name, value in [*settings.items(), *of_videos.items()]:
        if name not in _SOUND:
            continue
        if not isinstance(value, bool):
            raise PromptError(f"`{PROCESSOR}.{name}` must be true or false.", f"{PROCESSOR}.{name}")
        sound = msgspec.structs.replace(sound, is_heard=value)
    left = {name: value for name, value in settings.items() if name not in (*_SOUND, _VIDEOS)}
    left[_VIDEOS] = {name: value for name, value in of_videos.items() if name not in _SOUND}
    return left, msgspec.structs.replace(video, sound=sound)


def _scoped(settings: Mapping[str, Any], scope: str) -> Mapping[str, Any]:
    values = settings.get(scope) or {}
    if not isinstance(values, Mapping):
        raise PromptError(f"`{PROCESSOR}.{scope}` must be an object.", f"{PROCESSOR}.{scope}")
    return values


def _bounded(video: VideoInfo, settings: Mapping[str, Any]) -> VideoInfo:
    """Let the smallest area of frames be no obstacle to a largest one that is meant for pictures, too."""
    sizes = [value for value in settings.values() if isinstance(value, Mapping)]
    areas = [settings.get("max_pixels"), *(size.get("longest_edge") for size in sizes)]
    most = min((area for area in areas if type(area) is int), default=None)
    if most is None or not isinstance(video.geometry, SmartResize):
        return video
    least = min(video.geometry.min_pixels, most)
    return msgspec.structs.replace(video, geometry=msgspec.structs.replace(video.geometry, min_pixels=least))


def _with_video_settings(video: VideoInfo, settings: Mapping[str, Any]) -> VideoInfo:
    frames_only = _OF_FRAMES[video.sampling.rule]
    known = _known_of_frames(video.geometry)
    sampling = {name: value for name, value in settings.items() if name in frames_only}
    changes = _Changes()
    for name, value in settings.items():
        if name in frames_only:
            continue
        if name not in known:
            raise _unknown(name, (*frames_only, *known))
        changes |= known[name](name, value)
    geometry = msgspec.structs.replace(video.geometry, **changes)
    _check_bounds(geometry)
    return msgspec.structs.replace(video, geometry=geometry, sampling=_sampling(video.sampling, sampling, PROCESSOR))


def _sampling(sampling: FrameSampling, settings: Mapping[str, Any], where: str) -> FrameSampling:
    """Other frames. A rate alone replaces a number of frames; SmolVLM has both."""
    for name, value in settings.items():
        path = f"{where}.{name}"
        if name == "fps":
            if type(value) not in (int, float) or not 0 < value <= _MAX_RATE:
                raise PromptError(f"`{path}` must be a number above 0, and at most {_MAX_RATE}.", path)
        elif type(value) is not int or not 0 < value <= _MAX_FRAMES:
            raise PromptError(f"`{path}` must be a whole number from 1 to {_MAX_FRAMES}.", path)
    if sampling.rule != "smolvlm" and set(_RATE) <= set(settings):
        raise PromptError(f"`{where}` may have only one of `fps` and `num_frames`.", where)
    replaced = {"num_frames": None} if "fps" in settings and sampling.rule != "smolvlm" else {}
    changed = msgspec.structs.replace(sampling, **{**replaced, **settings})
    if changed.min_frames > changed.max_frames:
        raise PromptError(f"`{where}`: min_frames must be at most max_frames, {changed.max_frames}.", where)
    return changed


def with_frame_settings(info: PictureInfo, settings: Mapping[str, Any], *, are_lists: bool = False) -> PictureInfo:
    """The facts about a model with other frames of videos, by `media_io_kwargs`.

    As in vLLM, `num_frames` beside `fps` is the most frames, and -1 stands for any number.

    Args:
        info: facts about the model.
        settings: the settings.
        are_lists: all videos are sent as lists of frames, of which `fps` is the rate, whatever is read of files.

    Raises:
        PromptError: a setting is not one of this model, or its value is not valid.
    """
    values = settings.get("video") or {}
    where = f"{MEDIA_IO}.video"
    if not isinstance(values, Mapping):
        raise PromptError(f"`{where}` must be an object.", where)
    if not values:
        return info
    if info.video is None:
        raise PromptError(f"`{where}` is not supported: the model reads no videos.", where)
    rule = info.video.sampling.rule
    known = tuple(name for name in _RATE if name in _OF_FRAMES[rule] or (are_lists and name == "fps"))
    for name in values:
        if name not in known:
            supported = f"; supported are {', '.join(known)}" if known else ""
            raise PromptError(
                f"`{where}.{name[:100]}` is not supported for this model{supported}.", f"{where}.{name[:100]}"
            )
    changes = {name: value for name, value in values.items() if (name, value) != ("num_frames", -1)}
    if set(_RATE) <= set(changes) and "max_frames" in _OF_FRAMES[rule]:
        changes = {"fps": changes["fps"], "max_frames": changes["num_frames"], "min_frames": 1}
    sampling = _sampling(info.video.sampling, changes, where)
    if "fps" not in _OF_FRAMES[rule]:
        sampling = info.video.sampling
    return msgspec.structs.replace(info, video=msgspec.structs.replace(info.video, sampling=sampling))


def frame_rate(settings: Mapping[str, Any]) -> float | None:
    """Frames in a second of a video that is sent as a list of frames, of `media_io_kwargs`; None: not known."""
    values = settings.get("video") or {}
    return values.get("fps") if isinstance(values, Mapping) else None


def _changed(geometry: Geometry, settings: Mapping[str, Any]) -> Geometry:
    changes = _Changes()
    for name, value in settings.items():
        changes |= _changes(geometry, name, value)
    changed = msgspec.structs.replace(geometry, **changes)
    _check_bounds(changed)
    return changed


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
        case PaddedTiles() | CanvasTiles():
            changes = {"max_tiles": 1}
        case TokenBudget():
            changes = {"max_tokens": min(TOKEN_BUDGETS)}
    return msgspec.structs.replace(info, geometry=msgspec.structs.replace(info.geometry, **changes))


def background_color(settings: Mapping[str, Any], default: Color) -> Color:
    """The colour behind transparent pictures, of `media_io_kwargs`.

    Raises:
        PromptError: there is another setting, or its value is not valid.
    """
    for kind, values in settings.items():
        if kind == "video":  # see `with_frame_settings`
            continue
        if values and (kind != "image" or not isinstance(values, Mapping) or set(values) != {"rgba_background_color"}):
            raise PromptError(
                f"`{MEDIA_IO}` supports only `image.rgba_background_color`, `video.num_frames` and `video.fps`.",
                f"{MEDIA_IO}.{kind[:100]}",
            )
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


def _known(geometry: Geometry) -> Mapping[str, Callable[[str, Any], _Changes]]:
    """The settings of a geometry: what they change."""
    match geometry:
        case SmartResize():
            return {
                "min_pixels": _number("min_pixels", _MAX_PIXELS),
                "max_pixels": _number("max_pixels", _MAX_PIXELS),
                "size": _size({"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}, _MAX_PIXELS),
            }
        case SplitTiles():
            return {
                "do_image_splitting": _switch("splits"),
                "size": _size({"longest_edge": "longest_edge"}, _MAX_EDGE),
            }
        case PatchRows():
            return {"size": _size({"longest_edge": "longest_edge"}, _MAX_EDGE)}
        case GridTiles():
            return {
                "min_patches": _number("min_tiles", MAX_TILES),
                "max_patches": _number("max_tiles", MAX_TILES),
            }
        case TokenBudget(largest=largest):
            possible = [tokens for tokens in TOKEN_BUDGETS if tokens <= largest]
            return {"max_soft_tokens": _choice("max_tokens", possible)}
        case CanvasTiles():
            return {
                "max_patches": _number("max_tiles", MAX_TILES),
                "resize_to_max_canvas": _switch("enlarges"),
            }
        case PaddedTiles():
            return {"dynamic_hd": _number("max_tiles", MAX_TILES)}
        case PanAndScan():
            return {
                "do_pan_and_scan": _switch("splits"),
                "pan_and_scan_min_crop_size": _number("min_crop", _MAX_EDGE),
                "pan_and_scan_max_num_crops": _number("max_crops", MAX_TILES),
            }
        case _:
            return {}


def _changes(geometry: Geometry, name: str, value: Any) -> _Changes:
    """The fields of a geometry that a setting changes."""
    known = _known(geometry)
    if name not in known:
        raise _unknown(name, known)
    return known[name](name, value)


def _unknown(name: str, known: Collection[str]) -> PromptError:
    supported = f"; supported are {', '.join(known)}" if known else ", which has no settings of pictures"
    return PromptError(
        f"`{PROCESSOR}.{name[:100]}` is not supported for this model{supported}.", f"{PROCESSOR}.{name[:100]}"
    )


def _known_of_frames(geometry: FrameGeometry) -> Mapping[str, Callable[[str, Any], _Changes]]:
    """The settings of the frames of videos: they are not divided."""
    return {name: change for name, change in _known(geometry).items() if name != "do_image_splitting"}


def _number(field: str, most: int) -> Callable[[str, Any], _Changes]:
    def change(name: str, value: Any) -> _Changes:
        if type(value) is not int or not 0 < value <= most:
            raise PromptError(f"`{PROCESSOR}.{name}` must be a whole number from 1 to {most}.", f"{PROCESSOR}.{name}")
        return {field: value}

    return change


def _choice(field: str, accepted: Sequence[int]) -> Callable[[str, Any], _Changes]:
    def change(name: str, value: Any) -> _Changes:
        if type(value) is not int or value not in accepted:
            numbers = ", ".join(map(str, accepted))
            raise PromptError(f"`{PROCESSOR}.{name}` must be one of {numbers}.", f"{PROCESSOR}.{name}")
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


def _check_bounds(geometry: Geometry) -> None:
    match geometry:
        case SmartResize(min_pixels=least, max_pixels=most) if least > most:
            raise PromptError(f"`{PROCESSOR}`: min_pixels must be at most max_pixels, {most}.", PROCESSOR)
        case GridTiles(min_tiles=least, max_tiles=most) if least > most:
            raise PromptError(f"`{PROCESSOR}`: min_patches must be at most max_patches, {most}.", PROCESSOR)

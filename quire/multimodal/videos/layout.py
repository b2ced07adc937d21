"""Layouts of videos: the text and tokens of frames, which follow from what is known before these are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np

from quire.engine.client.pictures import VideoInfo, VideoText
from quire.multimodal.pictures.layout import ItemLayout, PictureLayout, frame_layout

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALLEST_TENS, _HUNDRED, _THOUSAND = 20, 100, 1000


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What is known of a video before its frames are decoded.

    Attributes:
        frames: number of its frames.
        fps: frames in a second.
        duration: seconds; None: the video is a list of frames.
        height, width: of a frame, the right way up.
        chosen: indices of the frames that are read.
        turns: quarter turns, counterclockwise, that put a decoded frame the right way up.
    """

    frames: int
    fps: float
    duration: float | None
    height: int
    width: int
    chosen: tuple[int, ...]
    turns: int = 0

    @property
    def times(self) -> list[float]:
        """When the chosen frames are seen, in seconds."""
        return [index / self.fps for index in self.chosen]

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """The chosen frames in groups; the last one is repeated until its group is full."""
        full = [*self.chosen, *self.chosen[-1:] * (-len(self.chosen) % size)]
        return [tuple(full[start : start + size]) for start in range(0, len(full), size)]


def video_layout(info: VideoInfo, header: VideoHeader) -> PictureLayout:
    """The layout of a video.

    Raises:
        LayoutError: the model cannot read frames of this size.
    """
    frame = frame_layout(info, header.height, header.width, max(len(header.chosen), info.group))
    (item,) = frame.items
    groups = header.groups(info.group)
    items = [replace(item, images=info.group, is_video=True)] * len(groups)
    if info.is_timed:
        items = _timed(info, header, items)
    if info.newline:
        items[-1] = replace(item, images=info.group, is_video=True, row_length=item.row_length + 1)
    return PictureLayout(_TEXTS[info.text](header, groups, frame.text), tuple(items))


def _timed(info: VideoInfo, header: VideoHeader, items: Sequence[ItemLayout]) -> list[ItemLayout]:
    """Items whose rotary positions of time count on: all begin where the first one does.

    In floats of 32 bits, as transformers computes it.
    """
    interval = np.float32(1)
    if info.tokens_per_second is not None:
        seconds = info.group * header.frames / (len(header.chosen) * header.fps)
        interval = np.float32(info.tokens_per_second) * np.float32(seconds)
    times = (np.arange(len(items), dtype=np.float32) * interval).astype(np.int64)
    timed = [replace(item, time=int(time), continues=True) for item, time in zip(items, times, strict=True)]
    timed[-1] = replace(timed[-1], continues=False)
    return timed


def _tokens_only(_: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    return frame * len(groups)


def _qwen3_vl(header: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    middles = [(group[0] / header.fps + group[-1] / header.fps) / 2 for group in groups]
    return "".join(f"<{time:.1f} seconds>{frame}" for time in middles)


def _glm4v(header: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    return "".join(f"{frame}{int(group[0] / header.fps)}" for group in groups)


def _glm46v(header: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    return "".join(f"{frame}{group[0] / header.fps:.1f} seconds" for group in groups)


def _internvl(_: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    return "\n".join(f"Frame{index + 1}: {frame}" for index in range(len(groups)))


def _smolvlm(header: VideoHeader, _: Sequence[tuple[int, ...]], frame: str) -> str:
    times = header.times
    length = timedelta(seconds=int(times[-1] if header.duration is None else header.duration))
    lines = [f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{frame}" for time in times]
    count = in_words(len(times))
    introduction = f"You are provided the following series of {count} frames from a {length} [H:MM:SS] video.\n"
    return introduction + "".join(lines) + "\n\n"


_TEXTS: Mapping[VideoText, Callable[[VideoHeader, Sequence[tuple[int, ...]], str], str]] = {
    "tokens": _tokens_only,
    "qwen3_vl": _qwen3_vl,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
}


def in_words(number: int) -> str:
    """A number below a million in English words, as the package num2words writes it."""
    if number < _SMALLEST_TENS:
        return _UNITS[number]
    if number < _HUNDRED:
        tens, unit = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_UNITS[unit]}" if unit else "")
    if number < _THOUSAND:
        hundreds, left = divmod(number, _HUNDRED)
        return f"{_UNITS[hundreds]} hundred" + (f" and {in_words(left)}" if left else "")
    thousands, left = divmod(number, _THOUSAND)
    joint = " and " if left < _HUNDRED else ", "
    return f"{in_words(thousands)} thousand" + (f"{joint}{in_words(left)}" if left else "")

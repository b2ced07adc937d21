"""Layouts of videos: the text and tokens of frames, which follow from what is known before these are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby

import numpy as np

from quire.engine.client.pictures import VideoInfo, VideoSound, VideoText
from quire.multimodal.pictures.layout import ItemLayout, LayoutError, PictureLayout, frame_layout

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALLEST_TENS, _HUNDRED, _THOUSAND = 20, 100, 1000
_MOST_TIME = 1 << 24  # rotary positions, of which floats of 32 bits have each


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


def video_layout(info: VideoInfo, header: VideoHeader, sound: int = 0) -> PictureLayout:
    """The layout of a video.

    Args:
        info: facts about the model.
        header: what is known of the video.
        sound: tokens of its sound that stand between those of its frames; 0: it is silent.

    Raises:
        LayoutError: the model cannot read frames of this size.
    """
    frame = frame_layout(info, header.height, header.width, max(len(header.chosen), info.group))
    (item,) = frame.items
    groups = header.groups(info.group)
    items = [replace(item, images=info.group, is_video=True)] * len(groups)
    if info.is_timed:
        items = _timed(info, header, items)
    if sound and info.sound is not None:
        return _with_sound(info.sound, items, frame.text, sound)
    if info.newline:
        items[-1] = replace(item, images=info.group, is_video=True, row_length=item.row_length + 1)
    return PictureLayout(_TEXTS[info.text](header, groups, frame.text), tuple(items))


def _timed(info: VideoInfo, header: VideoHeader, items: Sequence[ItemLayout]) -> list[ItemLayout]:
    """Items whose rotary positions of time count on: all begin where the first one does.

    In floats of 32 bits, as transformers computes it.

    Raises:
        LayoutError: the frames are too far apart.
    """
    times = np.arange(len(items), dtype=np.float32)
    if info.tokens_per_second is not None:
        if not info.tokens_per_second * _seconds(info, header) * len(items) < _MOST_TIME:
            raise LayoutError("The frames of the video are too far apart for the positions of time of this model.")
        interval = np.float32(info.tokens_per_second) * np.float32(_seconds(info, header))
        times = times * interval
    timed = [replace(item, time=int(time), step=0) for item, time in zip(items, times, strict=True)]
    timed[-1] = replace(timed[-1], step=_largest(timed[-1]) + 1 if info.ends_at_largest else None)
    return timed


def _seconds(info: VideoInfo, header: VideoHeader) -> float:
    """From one group of frames to the next."""
    if info.nominal_rate is not None and info.sampling.num_frames is None:
        return info.group / (info.sampling.fps or info.nominal_rate)
    return info.group * header.frames / (len(header.chosen) * header.fps)


def _largest(item: ItemLayout) -> int:
    """The largest rotary position of an item, from where its video begins."""
    assert item.grid is not None
    return max(item.time, *(edge - 1 for edge in item.grid))


def _with_sound(sound: VideoSound, items: Sequence[ItemLayout], frame: str, tokens: int) -> PictureLayout:
    """Parts of frames and of so many tokens of sound take turns: those of the same seconds follow each other.

    A text in front of them has the rotary position before them; one behind them, and the token behind that, have the
    same. Where frames are further apart than a part is long, transformers divides their tokens; here they stay whole.
    """
    parts = -(-tokens // sound.part)
    groups = {part: list(group) for part, group in groupby(items, lambda item: item.time // sound.part)}
    last = max(groups)
    placed: list[ItemLayout] = []
    texts = [sound.before]
    for part in sorted({*range(parts), *groups}):
        shift = min(part * sound.part, tokens)
        frames = [replace(item, shift=shift, step=0) for item in groups.get(part, ())]
        placed += frames
        texts.append(frame * len(frames) + sound.token * (part < parts))
    placed[0] = replace(placed[0], text_before=True)
    if last >= parts:  # the frames end after the sound
        end = _largest(placed[-1]) + 1 - placed[-1].shift
        placed[-1] = replace(placed[-1], step=end, text_behind=True)
    return PictureLayout("".join([*texts, sound.after]), tuple(placed))


def _tokens_only(_: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    return frame * len(groups)


def _qwen3_vl(header: VideoHeader, groups: Sequence[tuple[int, ...]], frame: str) -> str:
    middles = [(group[0] / header.fps + group[-1] / header.fps) / 2 for group in groups]
    return "".join(f"<{time:.1f} seconds>{frame}" for time in middles)


def _gemma4(header: VideoHeader, _: Sequence[tuple[int, ...]], frame: str) -> str:
    return " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {frame}" for time in header.times)


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
    "gemma4": _gemma4,
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

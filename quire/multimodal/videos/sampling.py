"""Which frames of a video a model reads: the rules of the video processors of transformers.

Where these compute with floats of 32 bits, the numbers here are exact. They refuse a video that has fewer frames than a
rule asks for; here all of its frames are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.client.pictures import FrameSampling, SamplingRule, VideoInfo

_DYNAMIC_RATES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))  # GLM-4.6V: frames for each second of videos up to a length
_LONGEST = 2400  # seconds, and frames, of which GLM-4.6V reads at most so many
_MOST_FRAMES = 640


@dataclass(frozen=True, slots=True)
class Timeline:
    """The frames of a video in time.

    Attributes:
        frames: number of its frames.
        fps: frames in a second, on average.
    """

    frames: int
    fps: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.fps


def chosen_frames(info: VideoInfo, timeline: Timeline) -> list[int]:
    """The indices of the frames of a video that are read, in ascending order; at least one."""
    return _RULES[info.sampling.rule](info.sampling, timeline, info.group)


def _number(sampling: FrameSampling, timeline: Timeline) -> float | None:
    """How many frames are wanted, before any bound; None: the rule has no number."""
    if sampling.num_frames is not None:
        return sampling.num_frames
    return None if sampling.fps is None else timeline.frames / timeline.fps * sampling.fps


def _evenly(count: int, frames: int) -> list[int]:
    """So many frames, each at the start of an equal part of the video."""
    count = max(1, min(count, frames))
    return [index * frames // count for index in range(count)]


def _uniform(sampling: FrameSampling, timeline: Timeline, _: int) -> list[int]:
    number = _number(sampling, timeline)
    return _evenly(timeline.frames if number is None else int(number), timeline.frames)


def _qwen2_vl(sampling: FrameSampling, timeline: Timeline, group: int) -> list[int]:
    number = _number(sampling, timeline)
    if number is None:
        return list(range(timeline.frames))
    if sampling.num_frames is not None:
        return _evenly(round(number / group) * group, timeline.frames)
    most = min(sampling.max_frames, timeline.frames) // group * group
    count = min(max(number, sampling.min_frames), most, timeline.frames)
    return _evenly(int(count // group * group), timeline.frames)


def _qwen3_vl(sampling: FrameSampling, timeline: Timeline, _: int) -> list[int]:
    number = _number(sampling, timeline)
    count = timeline.frames if number is None else int(number)
    if sampling.num_frames is None:
        count = min(max(count, sampling.min_frames), sampling.max_frames)
    count = max(1, min(count, timeline.frames))
    return [int(index) for index in np.linspace(0, timeline.frames - 1, count).round()]


def _glm4v(sampling: FrameSampling, timeline: Timeline, group: int) -> list[int]:
    assert sampling.fps is not None
    last = timeline.frames - 1
    duration = timeline.duration
    if duration <= sampling.max_seconds:
        count = max(1, math.floor(duration * sampling.fps))
        indices = [min(last, math.ceil(index * timeline.fps / sampling.fps)) for index in range(count)]
    elif (count := int(sampling.max_seconds * sampling.fps)) >= timeline.frames:
        indices = list(range(timeline.frames))
    else:
        indices = [min(last, math.ceil(time * timeline.fps)) for time in np.linspace(0, duration, count)]
    return _in_groups(indices, group)


def _glm46v(_: FrameSampling, timeline: Timeline, group: int) -> list[int]:
    frames = timeline.frames
    duration = timeline.duration
    seconds = min(duration, _LONGEST)
    rate = next(rate for longest, rate in _DYNAMIC_RATES if seconds <= longest)
    count = min(int(seconds * rate * group), _MOST_FRAMES)
    indices = _spread(0, frames - 1, count) if frames < count else _passing(timeline, 1 / (group * rate), int(duration))
    if len(indices) < count:
        indices = _spread(indices[0] if indices else 0, indices[-1] if indices else frames - 1, count)
    elif len(indices) > count:
        indices = _spread(0, frames - 1, count)
    return _in_groups(indices or [0], group)


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(index) for index in np.linspace(first, last, count, dtype=int)]


def _passing(timeline: Timeline, interval: float, end: int) -> list[int]:
    """The first frame at or after each multiple of an interval in seconds, until `end`."""
    indices = []
    following, frame_time = 0.0, 1 / timeline.fps
    for index in range(timeline.frames):
        if index * frame_time >= following:
            following += interval
            indices.append(index)
            if following >= end:
                break
    return indices


def _in_groups(indices: Sequence[int], group: int) -> list[int]:
    """Each index once, and the last one again until groups are full."""
    once = list(dict.fromkeys(indices))
    return once + once[-1:] * (-len(once) % group)


def _internvl(sampling: FrameSampling, timeline: Timeline, _: int) -> list[int]:
    number = _number(sampling, timeline)
    count = max(1, min(timeline.frames if number is None else int(number), timeline.frames))
    if sampling.shift is None:
        return [(2 * index + 1) * timeline.frames // (2 * count) for index in range(count)]
    indices = [int(sampling.shift + index * timeline.frames / count) for index in range(count)]
    return [index for index in indices if index < timeline.frames] or [timeline.frames - 1]


def _smolvlm(sampling: FrameSampling, timeline: Timeline, _: int) -> list[int]:
    """A second at each end of a long video is left out."""
    assert sampling.fps is not None
    assert sampling.num_frames is not None
    last = timeline.frames - 1
    count = max(1, min(round(sampling.fps * timeline.duration), sampling.num_frames))
    first, end = 0, last
    if timeline.duration - 2 > sampling.num_frames * sampling.fps:
        first, end = int(timeline.fps), min(int(timeline.frames - timeline.fps), last)
    if first >= end:
        first, end = 0, last
    return [int(index) for index in np.unique(np.linspace(first, end, count, dtype=int))]


_RULES: Mapping[SamplingRule, Callable[[FrameSampling, Timeline, int], list[int]]] = {
    "uniform": _uniform,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
}

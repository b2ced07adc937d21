"""Reads video files with FFmpeg's libraries, and makes the pixels of items of their frames.

Runs in worker processes: decoders are native code that reads what a stranger has sent.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from quire.engine.client.pictures import VideoInfo
from quire.engine.client.protocol import PixelArray
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures.decode import PARAM, PictureError, decoded
from quire.multimodal.pictures.decode import inspect as inspect_picture
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.pixels import picture_pixels
from quire.multimodal.videos.counting import fragments_at_least, frames_at_least
from quire.multimodal.videos.formats import NAMES, recognize, unpacked
from quire.multimodal.videos.layout import VideoHeader, video_layout
from quire.multimodal.videos.limits import VideoLimits
from quire.multimodal.videos.sampling import Timeline, chosen_frames

DEFAULT_FPS = 24.0  # of a list of frames whose rate is not known, as in transformers
_MOST_FRAMES = (
    180_000  # of a video, most of which are not read: 100 minutes of 30 a second, whose packets take a second
)
_MAX_FPS = 1000.0
_RATE_ERROR = 0.1
_MISSING = 0.5  # part of the announced length that may be missing: files may have a track that is longer
_MISSING_SECONDS = 1.0
_HIDDEN_TOLERANCE = 0.02  # part of the frames that may not be shown: some formats have such frames
_VP8_SHOWN = 0x10  # the bit of a VP8 frame that says that it is shown
_QUARTER = 90
_ALIGNED = 1 << 20  # pixels that decoders may add to a frame
# A video may take as long as it takes to decode so many pixels. To turn and to resize one takes as long as to decode
# several, and a frame takes as long as one of so many pixels at least.
_MOST_DECODED = 12 << 30
# Of an MP4 file, for each of which FFmpeg looks at all: 40,000 take it a second, 160,000 ten. They are 22 minutes of
# fragments of one frame; recorders write seconds into each.
_MOST_FRAGMENTS = 40_000
_RESIZING_COST = 4
_SMALLEST_FRAME = 1 << 14
_SEEKABLE = frozenset({"mov", "matroska"})  # demuxers that find a packet by its time


class VideoError(PromptError):
    """A file is not a video, is broken, or exceeds a limit."""

    def __init__(self, message: str, param: str = PARAM) -> None:
        super().__init__(message, param)

    def __reduce__(self) -> tuple[Any, ...]:
        return VideoError, (str(self), self.param)


@dataclass(frozen=True, slots=True)
class InspectVideo:
    """A job: read the header of a file, and choose frames. `fps`: of a list of frames, if it is known."""

    content: bytes
    info: VideoInfo
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class PrepareVideo:
    """A job: decode the chosen frames of a file, and make the pixels of its items."""

    content: bytes
    header: VideoHeader
    info: VideoInfo


Job = InspectVideo | PrepareVideo


def worker(limits: VideoLimits) -> Callable[[Job], VideoHeader | PixelArray]:
    """The function of a worker process."""
    Image.MAX_IMAGE_PIXELS = None  # our own limit is checked
    with suppress(ImportError):  # a job that needs it says so
        import av  # noqa: F401, PLC0415 before the first job has to wait for it

    def do(job: Job) -> VideoHeader | PixelArray:
        match job:
            case InspectVideo():
                return inspect(job, limits)
            case PrepareVideo():
                return prepare(job, limits)

    return do


def inspect(job: InspectVideo, limits: VideoLimits) -> VideoHeader:
    """Read what is known of a video before it is decoded, but for its first frame, and choose frames.

    Raises:
        VideoError: it is empty, not a video, broken, or beyond a limit.
    """
    if not job.content:
        raise VideoError("The file is empty.")
    if len(job.content) > limits.size:
        raise VideoError(
            f"The file has {len(job.content)} bytes; this server accepts videos of {limits.size} (--max-video-size)."
        )
    frames = unpacked(job.content)
    header = _of_file(job, limits) if frames is None else _of_frames(frames, job.fps or DEFAULT_FPS, limits)
    if len(header.chosen) > limits.frames:
        raise VideoError(
            f"{len(header.chosen)} frames of the video would be read; this server reads {limits.frames} "
            "(--max-video-frames). Send fewer, or set `num_frames` or `fps` in `media_io_kwargs.video`."
        )
    return header


def _of_frames(frames: Sequence[bytes], fps: float, limits: VideoLimits) -> VideoHeader:
    """All frames of a list are read."""
    if not frames:
        raise VideoError("The video has no frames.")
    if len(frames) > limits.frames:
        raise VideoError(f"The video has {len(frames)} frames; this server reads {limits.frames} (--max-video-frames).")
    sizes = set()
    for index, frame in enumerate(frames):
        try:
            header = inspect_picture(frame, PictureLimits(limits.size, limits.pixels))
        except PictureError as error:
            raise VideoError(f"Frame {index + 1} of the video: {error}") from error
        sizes.add((header.height, header.width))
    if len(sizes) > 1:
        raise VideoError("The frames of a video must have the same size.")
    ((height, width),) = sizes
    _check_work(len(frames), len(frames), height, width)
    return VideoHeader(len(frames), fps, None, height, width, tuple(range(len(frames))))


@dataclass(frozen=True, slots=True)
class _Packets:
    """The frames of a file as its packets announce them.

    Attributes:
        count: number of frames that are shown.
        times: their times in ascending order, in units of the stream; empty: they are not known.
        keys: those at which decoding can begin.
        end: seconds from the first frame to the end of the last one; 0: not known.
        rate: frames in a second, by their times; 0: not known.
    """

    count: int
    times: Sequence[int]
    keys: Sequence[int]
    end: float
    rate: float

    def decoded(self, chosen: Sequence[int], *, can_seek: bool) -> int:
        """How many frames have to be decoded to read those that are chosen."""
        keys = [bisect_left(self.times, key) for key in self.keys] if can_seek and self.times else []
        count, last = 0, -1
        for index in sorted(set(chosen)):
            place = bisect_right(keys, index) - 1
            start = last if place < 0 else max(last, keys[place] - 1)
            count += index - start
            last = index
        return count


def _of_file(job: InspectVideo, limits: VideoLimits) -> VideoHeader:
    demuxer = recognize(job.content)
    if demuxer is None:
        raise VideoError(f"The file is not a video of a supported format: {NAMES}.")
    if fragments_at_least(job.content, demuxer, _MOST_FRAGMENTS + 1) > _MOST_FRAGMENTS:
        raise VideoError(
            f"The video has more than {_MOST_FRAGMENTS} fragments. Send it with longer ones, or not fragmented."
        )
    with _opened(job.content, demuxer, limits.pixels) as (container, stream):
        _check_pixels(stream.codec_context.height, stream.codec_context.width, limits)
        announced = max(stream.frames, frames_at_least(job.content, demuxer, stream.id, _MOST_FRAMES + 1))
        if announced > _MOST_FRAMES:
            raise _too_many_frames()
        packets = _packets(container, stream)
        _check_complete(packets, stream, container)
        fps = _rate(packets, stream)
    with _opened(job.content, demuxer, limits.pixels) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise VideoError("The video has no frames.")
        _check_pixels(first.height, first.width, limits)
        turns = round(first.rotation / _QUARTER) % 4
    height, width = (first.width, first.height) if turns % 2 else (first.height, first.width)
    timeline = Timeline(packets.count, fps)
    chosen = tuple(chosen_frames(job.info, timeline))
    decoded = packets.decoded(chosen, can_seek=demuxer in _SEEKABLE)
    _check_work(decoded, len(set(chosen)), height, width)
    return VideoHeader(packets.count, fps, timeline.duration, height, width, chosen, turns)


@contextmanager
def _opened(content: bytes, demuxer: str, pixels: int) -> Iterator[tuple[Any, Any]]:
    """FFmpeg's container of a file, and its video stream. `pixels`: of the largest frame.

    Frames that say that they are much larger are not decoded; `_check_pixels` has the better error.
    """
    if find_spec("av") is None:
        raise VideoError("This server reads no videos: it lacks the package av (pip install 'quire[video]').")
    import av  # noqa: PLC0415 not everybody has it

    options = {"max_pixels": str(2 * pixels + _ALIGNED)}
    try:
        with av.open(
            io.BytesIO(content),
            "r",
            format=demuxer,
            options=options,
            metadata_errors="ignore",
            io_open=_refuse_to_open,
        ) as container:
            if not container.streams.video:
                raise VideoError("The file has no video stream.")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise VideoError("The video has a codec that this server does not know.")
            if not stream.time_base:
                raise VideoError("The video has no unit of time.")
            stream.codec_context.thread_count = 1
            stream.codec_context.options = options
            yield container, stream
    except (av.FFmpegError, PermissionError) as error:
        reason = (error.strerror or str(error)).strip().rstrip(".")[:200]
        raise VideoError(f"The video is broken or truncated: {reason}.") from error


def _refuse_to_open(url: str, flags: int, options: Any) -> Any:
    """A file that refers to others is not followed."""
    raise PermissionError(f"a reference to another file: {url[:100]}")


def _check_pixels(height: int, width: int, limits: VideoLimits) -> None:
    if not height * width:
        raise VideoError("The video has no pixels.")
    if height * width > limits.pixels:
        raise VideoError(
            f"The video has {width} x {height} pixels; this server accepts {limits.pixels} (--max-video-pixels)."
        )


def _check_work(decoded: int, chosen: int, height: int, width: int) -> None:
    """Refuse at once what would be given up after seconds. `decoded`: frames for the `chosen` ones."""
    if max(height * width, _SMALLEST_FRAME) * (decoded + _RESIZING_COST * chosen) > _MOST_DECODED:
        raise VideoError(
            f"The video takes too much time to read: {chosen} frames of {width} x {height} pixels are read, for which "
            f"{decoded} are decoded. Send smaller ones, or fewer: `media_io_kwargs.video` has `num_frames` and `fps`."
        )


def _packets(container: Any, stream: Any) -> _Packets:
    """Read all packets of a stream, without decoding them."""
    is_vp8 = stream.codec_context.name.startswith(("vp8", "libvpx"))
    count, end = 0, 0
    times: list[int] = []
    keys: list[int] = []
    for index, packet in enumerate(container.demux(stream)):
        if index > _MOST_FRAMES:  # the last packet is an empty one
            raise _too_many_frames()
        if not packet.size or packet.is_discard or (is_vp8 and not memoryview(packet)[0] & _VP8_SHOWN):
            continue
        count += 1
        if packet.pts is None:
            continue
        times.append(packet.pts)
        end = max(end, packet.pts + (packet.duration or 0))
        if packet.is_keyframe:
            keys.append(packet.pts)
    if not count:
        raise VideoError("The video has no frames.")
    times.sort()
    known = len(times) == len(set(times)) == count
    seconds = float((end - times[0]) * stream.time_base) if times else 0.0
    rate = (count - 1) / float((times[-1] - times[0]) * stream.time_base) if known and count > 1 else 0.0
    return _Packets(count, times if known else [], sorted(keys), seconds, rate)


def _too_many_frames() -> VideoError:
    return VideoError(f"The video has more than {_MOST_FRAMES} frames.")


def _check_complete(packets: _Packets, stream: Any, container: Any) -> None:
    """Refuse a file that has less than it announces: the model would be told of a time that it does not see."""
    if stream.frames > packets.count * (1 + _HIDDEN_TOLERANCE) + 1:
        raise VideoError(f"The video is truncated: it has {packets.count} of {stream.frames} frames.")
    import av  # noqa: PLC0415 not everybody has it

    if stream.duration:
        announced = float(stream.duration * stream.time_base)
    else:
        announced = (container.duration or 0) / av.time_base
    if packets.end and packets.end < announced * _MISSING - _MISSING_SECONDS:
        raise VideoError(f"The video is truncated: it has {packets.end:.1f} s of {announced:.1f} s.")


def _rate(packets: _Packets, stream: Any) -> float:
    """Frames in a second: those that the header announces, if that is near the truth, as recorders write any number."""
    rate = float(stream.average_rate or 0)
    if packets.rate and not 1 - _RATE_ERROR < rate / packets.rate < 1 + _RATE_ERROR:
        rate = packets.rate
    return rate if 0 < rate <= _MAX_FPS else DEFAULT_FPS


def prepare(job: PrepareVideo, limits: VideoLimits) -> PixelArray:
    """Decode the chosen frames of a video whose header was read, and make the pixels of its items.

    Raises:
        VideoError: it is broken.
    """
    header, info = job.header, job.info
    planned = video_layout(info, header)
    indices = [index for group in header.groups(info.group) for index in group]
    pixels: PixelArray = np.empty((len(indices), *planned.items[0].shape[1:]), np.uint8)
    frames = unpacked(job.content)
    images = _of_chosen(job.content, header) if frames is None else _pictures(frames, limits)
    for place, index in enumerate(indices):
        if place and index == indices[place - 1]:
            pixels[place] = pixels[place - 1]
            continue
        image = next(images)
        if image.size != (header.width, header.height):
            raise VideoError("The video changes its size.")
        pixels[place] = picture_pixels(info.geometry, image, planned)[0]
    return pixels


def _pictures(frames: Sequence[bytes], limits: VideoLimits) -> Iterator[Image.Image]:
    for index, frame in enumerate(frames):
        try:
            yield decoded(frame, inspect_picture(frame, PictureLimits(limits.size, limits.pixels)))
        except PictureError as error:
            raise VideoError(f"Frame {index + 1} of the video: {error}") from error


def _of_chosen(content: bytes, header: VideoHeader) -> Iterator[Image.Image]:
    """The chosen frames of a file, each once."""
    demuxer = recognize(content) or ""
    pixels = header.height * header.width
    with _opened(content, demuxer, pixels) as (container, stream):
        packets = _packets(container, stream)
    indices = list(dict.fromkeys(header.chosen))
    with _opened(content, demuxer, pixels) as (container, stream):
        decoder = _Decoder(container, stream, packets, can_seek=demuxer in _SEEKABLE)
        for index in indices:
            frame = decoder.frame(index)
            if decoder.missing > len(indices) * _HIDDEN_TOLERANCE + 1:
                raise VideoError("The video is broken or truncated: it has fewer frames than its header announces.")
            yield Image.fromarray(np.rot90(frame.to_ndarray(format="rgb24"), header.turns))


class _Decoder:
    """Decode frames of a file in ascending order.

    What lies between two of them is skipped where decoding can begin again behind it.

    Attributes:
        missing: frames that were not there, and for which the last one before was taken.
    """

    def __init__(self, container: Any, stream: Any, packets: _Packets, *, can_seek: bool) -> None:
        self.missing = 0
        self._container = container
        self._stream = stream
        self._packets = packets
        self._keys = packets.keys if can_seek else []
        self._frames = container.decode(stream)
        self._frame: Any = None
        self._index = -1  # of it, if times are not known

    def frame(self, index: int) -> Any:
        """The frame of an index.

        Raises:
            VideoError: there is none, nor one before it.
        """
        times = self._packets.times
        is_there = self._at_time(times[index]) if times else self._at_index(index)
        self.missing += not is_there
        if self._frame is None:
            raise VideoError("The video is broken or truncated: its frames cannot be decoded.")
        return self._frame

    def _at_index(self, index: int) -> bool:
        while self._index < index:
            frame = next(self._frames, None)
            if frame is None:
                return False
            self._frame = frame
            self._index += 1
        return True

    def _at_time(self, time: int) -> bool:
        """Decode up to a time; False if there is no such frame any more."""
        self._skip_to(time)
        while self._frame is None or self._frame.pts < time:
            frame = next(self._frames, None)
            if frame is None:
                return False
            if frame.pts is not None:
                self._frame = frame
        return True

    def _skip_to(self, time: int) -> None:
        """Go on from the last place before a time at which decoding can begin, if it is still to come."""
        place = bisect_right(self._keys, time) - 1
        if place < 0 or self._frame is None or self._keys[place] <= self._frame.pts:
            return
        self._container.seek(self._keys[place], stream=self._stream)
        self._frames = self._container.decode(self._stream)
        first = next(self._frames, None)
        if first is not None and first.pts is not None and first.pts <= time:
            self._frame = first
            return
        self._keys = []  # the file's index is wrong: all of it is decoded
        self._container.seek(self._packets.times[0], stream=self._stream)
        self._frames = self._container.decode(self._stream)

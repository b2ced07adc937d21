"""How pictures and videos are prepared: the jobs for worker processes, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np

from quire.engine.client.pictures import Color, PictureInfo, TransformersProcessor, VideoInfo
from quire.engine.client.protocol import EncoderInput, PixelArray
from quire.multimodal.pictures.cache import PreparedPicture, RequestCache
from quire.multimodal.pictures.decode import Inspect, PictureHeader, Prepare
from quire.multimodal.pictures.layout import PictureLayout, layout
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.processor import MeasuredPicture, Process
from quire.multimodal.videos.decode import InspectVideo, PrepareVideo
from quire.multimodal.videos.layout import VideoHeader, video_layout
from quire.multimodal.videos.limits import VideoLimits
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool

_SECONDS = 5.0  # of processor time for a picture
_VIDEO_SECONDS = 30.0
_WORKER_MEMORY = 256 << 20  # bytes, beside the file and the picture
_PIXEL_COPIES = 12  # bytes for each pixel of a picture while it is decoded, turned and resized
_FIRST_FRAME_COPIES = 6  # bytes for each pixel of the largest frame while the first one is decoded
_VIDEO_PIXEL_COPIES = 48  # of a frame: decoders keep up to 16 of them, of 1.5 bytes, or of 3
_PROCESSOR_SECONDS = 30.0
_PROCESSOR_START_SECONDS = 2.0  # which its process takes to import transformers
_INPUT_COPIES = 6  # of the inputs that transformers' processor makes: it computes them step by step, some as float64
_NO_PIXELS: PixelArray = np.empty((0, 0, 0, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture or a video of a request.

    Attributes:
        content: the file; None: one that was sent before with this name.
        where: the content part that it came in, for errors.
        info: facts about the model, with the options for this picture. Those about videos say that it is one.
        name: the client's name of the content.
        fps: frames in a second of a video that is a list of frames; None: it is not known.
        sound: tokens of a video's sound that stand between its frames.
        is_heard: there will be such tokens, which are not known yet.
        request_cache: keeps what becomes of it for the next prompts of its request; None: there are none.
    """

    content: IO[bytes] | None
    where: str
    info: PictureInfo | VideoInfo
    name: str | None = None
    fps: float | None = None
    sound: int = 0
    is_heard: bool = False
    request_cache: RequestCache | None = None


class Header(Protocol):
    """What is known of a file before it is decoded: the size of the picture, or of a frame of the video."""

    @property
    def height(self) -> int:
        """In pixels."""

    @property
    def width(self) -> int:
        """In pixels."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Jobs that may wait for a process, and the largest part of these for one tenant; see `Shares`."""

    max_queued: int
    share: float


class Medium(Protocol):
    """How files of a kind are prepared.

    Attributes:
        name: what they are, for errors.
        seconds: of processor time for a job.
        inspection_memory: bytes that reading a header takes beside the file.
        processes: the worker processes.
    """

    name: str
    seconds: float
    inspection_memory: int
    processes: WorkerPool

    def inspect(self, content: bytes, file: PictureFile) -> Any:
        """The job that reads a file's header."""

    def layout(self, file: PictureFile, header: Any) -> PictureLayout:
        """The layout of a file whose header was read."""

    def prepare(self, content: bytes, file: PictureFile, header: Any, background: Color) -> Any:
        """The job that makes the pixels of a file's items."""

    def working_memory(self, header: Any) -> int:
        """Bytes that decoding takes beside the file, the result, and images between both."""

    def prepared(self, layout: PictureLayout, result: Any) -> PreparedPicture:
        """What the job has prepared. Requests share its arrays: nothing writes to them."""


class Pictures:
    """Pictures; see `Medium`."""

    name = "picture"
    seconds = _SECONDS
    inspection_memory = 0

    def __init__(self, limits: PictureLimits, queue: QueueLimits) -> None:
        memory = 4 * limits.size + _PIXEL_COPIES * limits.pixels
        self.processes = _processes("pictures", "pictures.decode", (limits,), memory, self.seconds, queue, size=2)

    def inspect(self, content: bytes, _: PictureFile) -> Inspect:
        return Inspect(content)

    def layout(self, file: PictureFile, header: PictureHeader) -> PictureLayout:
        assert isinstance(file.info, PictureInfo)
        return layout(file.info, header.height, header.width)

    def prepare(self, content: bytes, file: PictureFile, header: PictureHeader, background: Color) -> Prepare:
        assert isinstance(file.info, PictureInfo)
        return Prepare(content, header, file.info, background)

    def working_memory(self, header: PictureHeader) -> int:
        return _PIXEL_COPIES * header.height * header.width

    def prepared(self, layout: PictureLayout, result: PixelArray) -> PreparedPicture:
        return _with_pixels(layout, result)


class ProcessedPictures:
    """Pictures that transformers' processor of a model prepares; see `Medium`."""

    name = "picture"
    seconds = _PROCESSOR_SECONDS
    inspection_memory = 0

    def __init__(self, folder: str, limits: PictureLimits, memory: int, queue: QueueLimits) -> None:
        """`folder`: that of the model; `memory`: bytes of the largest result."""
        memory += 4 * limits.size + _PIXEL_COPIES * limits.pixels
        self.processes = _processes(
            "processor",
            "pictures.processor",
            (limits, folder),
            memory,
            self.seconds,
            queue,
            cancelled_seconds=_PROCESSOR_START_SECONDS,
        )

    def inspect(self, content: bytes, _: PictureFile) -> Inspect:
        return Inspect(content)

    def measuring_memory(self, header: PictureHeader, geometry: TransformersProcessor) -> int:
        """Bytes that it takes to find out what becomes of a picture."""
        return _PIXEL_COPIES * header.height * header.width + _INPUT_COPIES * geometry.input_bytes

    def layout(self, _: PictureFile, header: MeasuredPicture) -> PictureLayout:
        return header.layout

    def prepare(self, content: bytes, file: PictureFile, header: MeasuredPicture, background: Color) -> Process:
        assert isinstance(file.info, PictureInfo)
        return Process(content, header, file.info, background)

    def working_memory(self, header: MeasuredPicture) -> int:
        return _PIXEL_COPIES * header.height * header.width + _INPUT_COPIES * header.layout.size

    def prepared(self, layout: PictureLayout, result: tuple[EncoderInput, ...]) -> PreparedPicture:
        for encoder_input in result:
            encoder_input.values.flags.writeable = False
        return PreparedPicture(layout, _NO_PIXELS, result)


class Videos:
    """Videos; see `Medium`."""

    name = "video"
    seconds = _VIDEO_SECONDS

    def __init__(self, limits: VideoLimits, memory: int, queue: QueueLimits) -> None:
        """`memory`: bytes of the largest result."""
        self.inspection_memory = _FIRST_FRAME_COPIES * limits.pixels
        memory += 4 * limits.size + _VIDEO_PIXEL_COPIES * limits.pixels
        self.processes = _processes("videos", "videos.decode", (limits,), memory, self.seconds, queue)

    def inspect(self, content: bytes, file: PictureFile) -> InspectVideo:
        assert isinstance(file.info, VideoInfo)
        return InspectVideo(content, file.info, file.fps)

    def layout(self, file: PictureFile, header: VideoHeader) -> PictureLayout:
        assert isinstance(file.info, VideoInfo)
        return video_layout(file.info, header, file.sound)

    def prepare(self, content: bytes, file: PictureFile, header: VideoHeader, _: Color) -> PrepareVideo:
        assert isinstance(file.info, VideoInfo)
        return PrepareVideo(content, header, file.info)

    def working_memory(self, header: VideoHeader) -> int:
        return _VIDEO_PIXEL_COPIES * header.height * header.width

    def prepared(self, layout: PictureLayout, result: PixelArray) -> PreparedPicture:
        return _with_pixels(layout, result)


def _processes(
    name: str,
    module: str,
    arguments: tuple[Any, ...],
    memory: int,
    seconds: float,
    queue: QueueLimits,
    *,
    size: int = 1,
    cancelled_seconds: float = 0.0,
) -> WorkerPool:
    """The worker processes of a medium.

    Args:
        name: see `WorkerPool`.
        module: that of their function `worker`, in `quire.multimodal`.
        arguments: of that function.
        memory: bytes of the largest file and of what becomes of it.
        seconds: of processor time for a job.
        queue: jobs that may wait.
        size, cancelled_seconds: see `WorkerPool`.
    """
    return WorkerPool(
        name,
        f"quire.multimodal.{module}:worker",
        arguments,
        WorkerLimits(memory=_WORKER_MEMORY + memory, seconds=seconds, stack=1 << 24),
        size=size,
        max_queued=queue.max_queued,
        share=queue.share,
        cancelled_seconds=cancelled_seconds,
    )


def _with_pixels(layout: PictureLayout, pixels: PixelArray) -> PreparedPicture:
    pixels.flags.writeable = False
    return PreparedPicture(layout, pixels)

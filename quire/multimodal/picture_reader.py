"""Prepares the pictures and videos of requests in worker processes, within reserved memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import IO, Any, Protocol, TypeVar

import msgspec

from quire.config.options import PictureOptions, VideoOptions
from quire.engine.client.pictures import Color, PictureInfo, VideoInfo
from quire.engine.client.protocol import PictureItem, PixelArray
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.pictures.cache import Key, PictureCache, PreparedPicture
from quire.multimodal.pictures.decode import WHITE, Inspect, PictureError, PictureHeader, Prepare
from quire.multimodal.pictures.layout import LayoutError, PictureLayout, layout
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.placement import Placeholders
from quire.multimodal.videos.decode import InspectVideo, PrepareVideo, VideoError
from quire.multimodal.videos.layout import VideoHeader, video_layout
from quire.multimodal.videos.limits import VideoLimits
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool

Result = TypeVar("Result")
_SECONDS = 5.0  # of processor time for a picture
_VIDEO_SECONDS = 30.0
_WORKER_MEMORY = 256 << 20  # bytes, beside the file and the picture
_COPIES = 7  # of a file while it is sent: three in this process, four in the worker
_PIXEL_COPIES = 12  # bytes for each pixel of a picture while it is decoded, turned and resized
_FIRST_FRAME_COPIES = 6  # bytes for each pixel of the largest frame while the first one is decoded
_VIDEO_PIXEL_COPIES = 48  # of a frame: decoders keep up to 16 of them, of 1.5 bytes, or of 3
_RESULT_COPIES = 5  # of the pixels of items while they are made
_AT_ONCE = 2  # pictures of one request
_BLOCK = 1 << 20  # bytes that are hashed at once


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture or a video of a request.

    Attributes:
        content: the file; None: one that was sent before with this name.
        where: the content part that it came in, for errors.
        info: facts about the model, with the options for this picture. Those about videos say that it is one.
        name: the client's name of the content.
        fps: frames in a second of a video that is a list of frames; None: it is not known.
    """

    content: IO[bytes] | None
    where: str
    info: PictureInfo | VideoInfo
    name: str | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """A picture or video that is ready for the engine.

    Attributes:
        info: facts about the model, by which it was prepared.
        layout: its layout.
        items: its items, whose places are not set.
    """

    info: PictureInfo | VideoInfo
    layout: PictureLayout
    items: tuple[PictureItem, ...]


class _Medium(Protocol):
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
        """Bytes that decoding takes beside the file and the result."""


class _Pictures:
    """Pictures; see `_Medium`."""

    name = "picture"
    seconds = _SECONDS
    inspection_memory = 0

    def __init__(self, limits: PictureLimits, max_queued: int, share: float) -> None:
        self.processes = WorkerPool(
            "pictures",
            "quire.multimodal.pictures.decode:worker",
            (limits,),
            WorkerLimits(
                memory=_WORKER_MEMORY + 4 * limits.size + _PIXEL_COPIES * limits.pixels,
                seconds=self.seconds,
                stack=1 << 24,
            ),
            size=2,
            max_queued=max_queued,
            share=share,
        )

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


class _Videos:
    """Videos; see `_Medium`."""

    name = "video"
    seconds = _VIDEO_SECONDS

    def __init__(self, limits: VideoLimits, memory: int, max_queued: int, share: float) -> None:
        """`memory`: bytes of the largest result."""
        self.inspection_memory = _FIRST_FRAME_COPIES * limits.pixels
        self.processes = WorkerPool(
            "videos",
            "quire.multimodal.videos.decode:worker",
            (limits,),
            WorkerLimits(
                memory=_WORKER_MEMORY + 4 * limits.size + _VIDEO_PIXEL_COPIES * limits.pixels + memory,
                seconds=self.seconds,
                stack=1 << 24,
            ),
            size=1,
            max_queued=max_queued,
            share=share,
        )

    def inspect(self, content: bytes, file: PictureFile) -> InspectVideo:
        assert isinstance(file.info, VideoInfo)
        return InspectVideo(content, file.info, file.fps)

    def layout(self, file: PictureFile, header: VideoHeader) -> PictureLayout:
        assert isinstance(file.info, VideoInfo)
        return video_layout(file.info, header)

    def prepare(self, content: bytes, file: PictureFile, header: VideoHeader, _: Color) -> PrepareVideo:
        assert isinstance(file.info, VideoInfo)
        return PrepareVideo(content, header, file.info)

    def working_memory(self, header: VideoHeader) -> int:
        return _VIDEO_PIXEL_COPIES * header.height * header.width


@dataclass(frozen=True, slots=True)
class _Planned:
    """A picture or video whose layout is known, and what is needed to prepare it.

    Attributes:
        header: None if it was in the cache.
        size: bytes of the file.
        working_memory: bytes that decoding takes beside the file and the result.
    """

    file: PictureFile
    key: Key
    layout: PictureLayout
    header: PictureHeader | VideoHeader | None = None
    size: int = 0
    working_memory: int = 0


class PictureReader:
    """Prepare the pictures and videos of one model's requests.

    Attributes:
        cache: what was prepared.
    """

    def __init__(
        self,
        options: PictureOptions,
        memory: MediaMemory,
        *,
        max_size: int,
        videos: VideoOptions | None = None,
        max_queued: int = 1024,
        share: float = 1.0,
        on_lookup: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Prepare; the first picture starts what it needs.

        Args:
            options: limits of pictures, and of their cache.
            memory: the memory for media.
            max_size: bytes of the largest picture file.
            videos: limits of videos; None: those that are usual.
            max_queued: pictures that may wait for a process.
            share: the largest part of these for one tenant; see `Shares`.
            on_lookup: is told of each picture whether another request has prepared it.
        """
        self.cache = PictureCache(int(options.mm_processor_cache_gb * (1 << 30)))
        self._memory = memory
        self._on_lookup = on_lookup
        videos = videos or VideoOptions()
        video_limits = VideoLimits(int(videos.max_video_size), videos.max_video_pixels, videos.max_video_frames)
        self._pictures = _Pictures(PictureLimits(max_size, options.max_image_pixels), max_queued, share)
        self._videos = _Videos(video_limits, memory.most, max_queued, share)

    async def prepare(
        self,
        files: Sequence[PictureFile],
        *,
        max_tokens: int,
        sequences: int,
        background: Color = WHITE,
        tenant: str = "",
    ) -> list[RequestPicture]:
        """Make items of pictures and videos.

        First the headers of all files are read, which say how many tokens they have. Then the memory for all of
        them is reserved at once: a request that waited for more while it holds some could wait for others that do the
        same. It is held for as long as the items live.

        Args:
            files: the pictures and videos.
            max_tokens: tokens of the context, which they must not fill.
            sequences: requests to the engine that will have the items.
            background: colour behind transparent pixels.
            tenant: the tenant that sent them; tenants take turns.

        Raises:
            PromptError: a file is not a picture or video, is broken, or is beyond a limit; or all need more tokens
                or memory than there are.
            QueueFull: too many pictures wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        planned = await _at_most(_AT_ONCE, [partial(self._plan, file, background, tenant) for file in files])
        _check_tokens(planned, max_tokens)
        needed = _needed(planned, sequences)
        largest = max(planned, key=lambda plan: plan.layout.size)
        with await self._reserve(needed, tenant, largest.file.where) as reservation:
            works = [partial(self._picture, plan, background, tenant) for plan in planned]
            pictures = await _at_most(_AT_ONCE, works)
            return [
                _request_picture(plan, picture, reservation, 1 + sequences)
                for plan, picture in zip(planned, pictures, strict=True)
            ]

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(self._pictures.processes.close(), self._videos.processes.close())

    def _medium(self, file: PictureFile) -> _Medium:
        return self._videos if isinstance(file.info, VideoInfo) else self._pictures

    async def _plan(self, file: PictureFile, background: Color, tenant: str) -> _Planned:
        medium = self._medium(file)
        options = hashlib.sha256(msgspec.json.encode((medium.name, file.info, file.fps, background))).digest()
        key = await self._digest(file, tenant), options
        kept = self.cache.peek(key)
        if kept is not None:
            return _Planned(file, key, kept.layout, size=file.content.tell() if file.content else 0)
        if file.content is None:
            raise self._unknown(file)
        size = file.content.tell()  # it was read to its end
        with await self._reserve(_COPIES * size + medium.inspection_memory, tenant, file.where):
            job = medium.inspect(await asyncio.to_thread(_content, file.content), file)
            header = await self._run(medium, job, file.where, tenant)
        try:
            planned = medium.layout(file, header)
        except LayoutError as error:
            raise PictureError(str(error), file.where) from error
        return _Planned(file, key, planned, header, size, medium.working_memory(header))

    async def _digest(self, file: PictureFile, tenant: str) -> bytes:
        """The hash of a file's content."""
        if file.content is None:
            digest = self.cache.named(tenant, file.name or "")
            if digest is None:
                raise self._unknown(file)
            return digest
        digest = await asyncio.to_thread(_hash, file.content)
        if file.name is not None:
            self.cache.name(tenant, file.name, digest)
        return digest

    @staticmethod
    def _unknown(file: PictureFile) -> PictureError:
        name = "video" if isinstance(file.info, VideoInfo) else "picture"
        return PictureError(f"The {name} of this `uuid` is not in the cache (any more): send it again.", file.where)

    async def _picture(self, plan: _Planned, background: Color, tenant: str) -> PreparedPicture:
        medium = self._medium(plan.file)

        async def make() -> PreparedPicture:
            content, header = plan.file.content, plan.header
            if content is None:
                raise self._unknown(plan.file)
            if header is None:  # it was in the cache when this was planned
                job = medium.inspect(await asyncio.to_thread(_content, content), plan.file)
                header = await self._run(medium, job, plan.file.where, tenant)
            job = medium.prepare(await asyncio.to_thread(_content, content), plan.file, header, background)
            pixels: PixelArray = await self._run(medium, job, plan.file.where, tenant)
            pixels.flags.writeable = False  # requests share them
            return PreparedPicture(plan.layout, pixels)

        try:
            picture, hit = await self.cache.get(plan.key, make)
        except PromptError as error:
            raise PictureError(str(error), plan.file.where) from error
        self._on_lookup(hit)
        return picture

    @staticmethod
    async def _run(medium: _Medium, job: Any, where: str, tenant: str) -> Any:
        try:
            return await medium.processes.run(job, tenant=tenant)
        except (PictureError, VideoError) as error:
            raise PictureError(str(error), where) from error
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull(f"the {medium.name} waited too long for processor time") from error
            raise PictureError(f"Decoding the {medium.name} took more than {medium.seconds:g} s.", where) from error
        except JobKilled as error:
            raise PictureError(f"The {medium.name} cannot be decoded: {error}.", where) from error

    async def _reserve(self, size: int, tenant: str, where: str) -> Reservation:
        try:
            return await self._memory.reserve(size, tenant)
        except PromptError as error:
            raise PictureError(str(error), where) from error


async def _at_most(count: int, works: Sequence[Callable[[], Awaitable[Result]]]) -> list[Result]:
    """The results of works, of which so many run at once. If one fails, the others are cancelled."""
    slots = asyncio.Semaphore(count)

    async def run(work: Callable[[], Awaitable[Result]]) -> Result:
        async with slots:
            return await work()

    tasks = [asyncio.create_task(run(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_tokens(planned: Sequence[_Planned], max_tokens: int) -> None:
    tokens = 0
    for plan in planned:
        tokens += plan.layout.tokens
        if tokens >= max_tokens:
            raise PictureError(
                f"This model's maximum context length is {max_tokens} tokens. However, the pictures and videos have "
                f"{tokens} tokens up to this one, and text and an answer must fit as well.",
                plan.file.where,
            )


def _needed(planned: Sequence[_Planned], sequences: int) -> int:
    """The most memory that pictures take while they are prepared, and in the requests to the engine, in bytes."""
    results = (1 + sequences) * sum(plan.layout.size for plan in planned)
    working = sorted(
        (_COPIES * plan.size + plan.working_memory + _RESULT_COPIES * plan.layout.size for plan in planned),
        reverse=True,
    )
    return results + sum(working[:_AT_ONCE])


def _request_picture(plan: _Planned, picture: PreparedPicture, reservation: Reservation, copies: int) -> RequestPicture:
    """The items of a picture for one request, which holds memory for them as long as it has them."""
    items = []
    first = 0
    for index, item in enumerate(picture.layout.items):
        pixels = picture.pixels[first : first + item.images]
        first += item.images
        reservation.pass_on(pixels, copies * item.size)
        items.append(
            PictureItem(
                hash=hashlib.sha256(b"".join((*plan.key, index.to_bytes(4, "little")))).digest(),
                length=item.length,
                pixels=pixels,
                text_offsets=item.text_offsets(),
                positions=item.positions(),
                advance=item.advance,
                original_size=item.original_size,
                is_video=item.is_video,
            )
        )
    return RequestPicture(plan.file.info, picture.layout, tuple(items))


def picture_placeholders(pictures: Sequence[RequestPicture]) -> list[Placeholders]:
    """The placeholders of pictures and videos whose layouts are in the text of a prompt: one for each row of an item.

    Those of videos may have a token of their own. Those with the same token have the order of `pictures`.
    """
    infos = {picture.info.placeholder: picture.info for picture in pictures}
    return [_placeholders([picture for picture in pictures if picture.info.placeholder == token]) for token in infos]


def _placeholders(pictures: Sequence[RequestPicture]) -> Placeholders:
    repeats: list[int] = []
    items: list[tuple[int, PictureItem]] = []
    for item_layout, item in chain.from_iterable(
        zip(picture.layout.items, picture.items, strict=True) for picture in pictures
    ):
        items.append((len(repeats), item))
        repeats += [item_layout.row_length] * item_layout.rows
    info = pictures[0].info
    return Placeholders(info.placeholder, info.token, "picture or video", repeats, items)


def _hash(file: IO[bytes]) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.digest()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()

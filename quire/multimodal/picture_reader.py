"""Prepares the pictures and videos of requests in worker processes, within reserved memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import IO, Any

import msgspec

from quire.config.options import PictureOptions, VideoOptions
from quire.engine.client.pictures import Color, PictureInfo, TransformersProcessor, VideoInfo
from quire.engine.client.protocol import EncoderInput, PictureItem
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.picture_jobs import Medium, PictureFile, Pictures, ProcessedPictures, Videos
from quire.multimodal.pictures.cache import Key, PictureCache, PreparedPicture
from quire.multimodal.pictures.decode import WHITE, PictureError, PictureHeader, ReadEmbeddings
from quire.multimodal.pictures.embeddings import embeddings_item, embeddings_layout
from quire.multimodal.pictures.layout import LayoutError, PictureLayout, pixels_between
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.processor import Measure, MeasuredPicture
from quire.multimodal.placement import Placeholders
from quire.multimodal.videos.layout import VideoHeader
from quire.multimodal.videos.limits import VideoLimits
from quire.workers.concurrency import gather_limited
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull

_COPIES = 7  # of a file while it is sent: three in this process, four in the worker
_BETWEEN_COPIES = 6  # bytes for each pixel of an image that is made in between; see `pixels_between`
_RESULT_COPIES = 5  # of the pixels of items while they are made
_AT_ONCE = 2  # pictures of one request
_BLOCK = 1 << 20  # bytes that are hashed at once


@dataclass(frozen=True, slots=True)
class EmbeddingsFile:
    """A picture of a request whose embeddings the client has computed.

    Attributes:
        content: the file with the embeddings.
        where: the content part that it came in, for errors.
        info: facts about the model.
        grid: time, height and width in patches, or a file with these; None: they were not sent.
    """

    content: IO[bytes]
    where: str
    info: PictureInfo
    grid: tuple[int, ...] | bytes | None


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


@dataclass(frozen=True, slots=True)
class _Planned:
    """A picture or video whose layout is known, and what is needed to prepare it.

    Attributes:
        header: None if it was in the cache.
        working_memory: the most memory that it takes while it is prepared, in bytes.
    """

    file: PictureFile
    key: Key
    layout: PictureLayout
    header: PictureHeader | VideoHeader | MeasuredPicture | None = None
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
        self._limits = PictureLimits(max_size, options.max_image_pixels)
        self._queue_limits = max_queued, share
        self._pictures = Pictures(self._limits, *self._queue_limits)
        self._processed: dict[str, ProcessedPictures] = {}  # by the folder of the model, of which there is one
        self._videos = Videos(video_limits, memory.most, max_queued, share)

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
        planned = await gather_limited(_AT_ONCE, [partial(self._plan, file, background, tenant) for file in files])
        _check_tokens(planned, max_tokens)
        largest = max(planned, key=lambda plan: plan.layout.size)
        while True:
            with await self._memory.reserve(_needed(planned, sequences), tenant, largest.file.where) as reservation:
                cached = [self.cache.find(plan.key) for plan in planned]
                if all(plan.header or picture for plan, picture in zip(planned, cached, strict=True)):
                    pictures = await self._prepared(planned, cached, background, tenant)
                    return [
                        _request_picture(plan, picture, reservation, 1 + sequences)
                        for plan, picture in zip(planned, pictures, strict=True)
                    ]
            # Some have left the cache meanwhile: memory for decoding them has to be reserved as well.
            works = [
                partial(self._renewed, plan, tenant, is_cached=picture is not None)
                for plan, picture in zip(planned, cached, strict=True)
            ]
            del cached
            planned = await gather_limited(_AT_ONCE, works)

    async def embeddings(
        self, files: Sequence[EmbeddingsFile], *, max_tokens: int, sequences: int, tenant: str = ""
    ) -> list[RequestPicture]:
        """Make items of pictures whose embeddings are known. The memory is held for as long as the items live.

        Args:
            files: the embeddings.
            max_tokens, sequences, tenant: as of `prepare`.

        Raises:
            PromptError: a file has something else, or does not fit to the model; or all need more tokens or memory
                than there are.
            QueueFull: too many wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        sizes = [await asyncio.to_thread(file.content.seek, 0, os.SEEK_END) for file in files]
        held = 2 * (1 + sequences) * sum(sizes)  # numbers of 16 bits become such of 32
        working = (_COPIES + 2 * _RESULT_COPIES) * sum(sorted(sizes, reverse=True)[:_AT_ONCE])
        with await self._memory.reserve(held + working, tenant, files[0].where) as reservation:
            read = await gather_limited(_AT_ONCE, [partial(self._embeddings, file, tenant) for file in files])
            tokens = sum(picture.layout.tokens for picture in read)
            if tokens >= max_tokens:
                raise PictureError(
                    f"This model's maximum context length is {max_tokens} tokens. However, the pictures have {tokens} "
                    "tokens, and text and an answer must fit as well.",
                    files[-1].where,
                )
            for picture in read:
                for item in picture.items:
                    assert item.encoding is not None
                    reservation.pass_on(item.encoding, (1 + sequences) * item.encoding.nbytes)
        return read

    async def _embeddings(self, file: EmbeddingsFile, tenant: str) -> RequestPicture:
        job = ReadEmbeddings(await asyncio.to_thread(_content, file.content), file.grid)
        values, grid = await self._run(self._pictures, job, file.where, tenant)
        try:
            planned = embeddings_layout(file.info, values, grid)
        except PromptError as error:
            raise PictureError(str(error), file.where) from error
        values.flags.writeable = False
        return RequestPicture(file.info, planned, (await asyncio.to_thread(embeddings_item, values, planned),))

    async def close(self) -> None:
        """End the processes."""
        media: tuple[Medium, ...] = (self._pictures, self._videos, *self._processed.values())
        await asyncio.gather(*(medium.processes.close() for medium in media))

    def _medium(self, file: PictureFile) -> Medium:
        if isinstance(file.info, VideoInfo):
            return self._videos
        geometry = file.info.geometry
        if not isinstance(geometry, TransformersProcessor):
            return self._pictures
        if geometry.folder not in self._processed:
            self._processed[geometry.folder] = ProcessedPictures(
                geometry.folder, self._limits, self._memory.most, *self._queue_limits
            )
        return self._processed[geometry.folder]

    async def _plan(self, file: PictureFile, background: Color, tenant: str) -> _Planned:
        medium = self._medium(file)
        described = (medium.name, file.info, file.fps, file.sound, background)
        options = hashlib.sha256(msgspec.json.encode(described)).digest()
        key = await self._digest(file, tenant), options
        cached = self.cache.find(key)
        return await self._inspected(file, key, tenant) if cached is None else _Planned(file, key, cached.layout)

    async def _renewed(self, plan: _Planned, tenant: str, *, is_cached: bool) -> _Planned:
        """The plan, with a header if the picture is to be decoded."""
        return plan if plan.header or is_cached else await self._inspected(plan.file, plan.key, tenant)

    async def _inspected(self, file: PictureFile, key: Key, tenant: str) -> _Planned:
        """The plan of a file whose header is read."""
        if file.content is None:
            raise self._unknown(file)
        medium = self._medium(file)
        size = file.content.tell()  # it was read to its end
        with await self._memory.reserve(_COPIES * size + medium.inspection_memory, tenant, file.where):
            job = medium.inspect(await asyncio.to_thread(_content, file.content), file)
            header = await self._run(medium, job, file.where, tenant)
        if isinstance(medium, ProcessedPictures):
            header = await self._measured(medium, header, file, tenant)
        try:
            planned = medium.layout(file, header)
        except LayoutError as error:
            raise PictureError(str(error), file.where) from error
        between = pixels_between(file.info.geometry, planned, *medium.size(header))
        working_memory = (
            _COPIES * size + medium.working_memory(header) + _BETWEEN_COPIES * between + _RESULT_COPIES * planned.size
        )
        return _Planned(file, key, planned, header, working_memory)

    async def _measured(
        self, medium: ProcessedPictures, header: PictureHeader, file: PictureFile, tenant: str
    ) -> MeasuredPicture:
        """What becomes of a picture, which the processor tells by a blank one of the same size."""
        assert isinstance(file.info, PictureInfo)
        assert isinstance(file.info.geometry, TransformersProcessor)
        with await self._memory.reserve(medium.measuring_memory(header, file.info.geometry), tenant, file.where):
            return MeasuredPicture(header, await self._run(medium, Measure(header, file.info), file.where, tenant))

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

    def _unknown(self, file: PictureFile) -> PictureError:
        name = self._medium(file).name
        return PictureError(f"The {name} of this `uuid` is not in the cache (any more): send it again.", file.where)

    async def _prepared(
        self, planned: Sequence[_Planned], cached: Sequence[PreparedPicture | None], background: Color, tenant: str
    ) -> list[PreparedPicture]:
        """The pictures of a request, which has reserved the memory to prepare those that are not in the cache."""
        works = [
            partial(self._picture, plan, picture, background, tenant)
            for plan, picture in zip(planned, cached, strict=True)
        ]
        return await gather_limited(_AT_ONCE, works)

    async def _picture(
        self, plan: _Planned, cached: PreparedPicture | None, background: Color, tenant: str
    ) -> PreparedPicture:
        medium = self._medium(plan.file)

        async def make() -> PreparedPicture:
            content, header = plan.file.content, plan.header
            if content is None or header is None:
                raise self._unknown(plan.file)
            job = medium.prepare(await asyncio.to_thread(_content, content), plan.file, header, background)
            return medium.prepared(plan.layout, await self._run(medium, job, plan.file.where, tenant))

        try:
            picture, hit = (cached, True) if cached else await self.cache.get(plan.key, make)
        except PromptError as error:
            raise PictureError(str(error), plan.file.where) from error
        self._on_lookup(hit)
        return picture

    @staticmethod
    async def _run(medium: Medium, job: Any, where: str, tenant: str) -> Any:
        try:
            return await medium.processes.run(job, tenant=tenant)
        except PromptError as error:
            raise PictureError(str(error), where) from error
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull(f"the {medium.name} waited too long for processor time") from error
            raise PictureError(f"Decoding the {medium.name} took more than {medium.seconds:g} s.", where) from error
        except JobKilled as error:
            raise PictureError(f"The {medium.name} cannot be decoded: {error}.", where) from error


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
    working = sorted((plan.working_memory for plan in planned), reverse=True)
    return results + sum(working[:_AT_ONCE])


def _request_picture(plan: _Planned, picture: PreparedPicture, reservation: Reservation, copies: int) -> RequestPicture:
    """The items of a picture for one request, which holds memory for them as long as it has them."""
    items = []
    first = 0
    for index, item in enumerate(picture.layout.items):
        pixels = picture.pixels[first : first + item.images]
        first += item.images
        inputs = tuple(EncoderInput(name=part.name, values=part.values.view()) for part in picture.inputs)
        for array in [part.values for part in inputs] or [pixels]:
            reservation.pass_on(array, copies * array.nbytes)
        items.append(
            PictureItem(
                hash=hashlib.sha256(b"".join((*plan.key, index.to_bytes(4, "little")))).digest(),
                start=-int(item.text_before),  # from its first placeholder
                length=item.length,
                pixels=pixels,
                inputs=inputs,
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
    tokens = dict.fromkeys(picture.info.placeholder for picture in pictures)
    return [_placeholders([picture for picture in pictures if picture.info.placeholder == token]) for token in tokens]


def _placeholders(pictures: Sequence[RequestPicture]) -> Placeholders:
    repeats: list[int] = []
    items: list[tuple[int, PictureItem]] = []
    for item_layout, item in chain.from_iterable(
        zip(picture.layout.items, picture.items, strict=True) for picture in pictures
    ):
        items.append((len(repeats), item))
        repeats += item_layout.repeats
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

"""Prepares the pictures and videos of requests in worker processes, within reserved memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import IO, Any

import msgspec

from quire.config.options import PictureOptions, VideoOptions
from quire.engine.client.pictures import Color, PictureInfo, TransformersProcessor, VideoInfo, VideoSound
from quire.engine.client.protocol import EncoderInput, PictureItem
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.picture_jobs import Header, Medium, PictureFile, Pictures, ProcessedPictures, QueueLimits, Videos
from quire.multimodal.pictures.cache import Key, PictureCache, PreparedPicture
from quire.multimodal.pictures.decode import WHITE, PictureError, PictureHeader, ReadEmbeddings
from quire.multimodal.pictures.embeddings import embeddings_item, embeddings_layout
from quire.multimodal.pictures.layout import LayoutError, PictureLayout, pixels_between
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.processor import Measure, MeasuredPicture
from quire.multimodal.placement import Placeholders
from quire.multimodal.preparation import MemoryNeed, NeedsMore
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
    header: Header | None = None
    working_memory: int = 0


class PictureReader:
    """Prepare the pictures and videos of one model's requests.

    Attributes:
        cache: what was prepared.
        memory: the memory for media.
        on_lookup: is told of each picture whether another request has prepared it.
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
            on_lookup: see the attribute.
        """
        self.cache = PictureCache(int(options.mm_processor_cache_gb * (1 << 30)))
        self.memory = memory
        self.on_lookup = on_lookup
        videos = videos or VideoOptions()
        video_limits = VideoLimits(int(videos.max_video_size), videos.max_video_pixels, videos.max_video_frames)
        self._limits = PictureLimits(max_size, options.max_image_pixels)
        self._queue = QueueLimits(max_queued, share)
        self._pictures = Pictures(self._limits, self._queue)
        self._processed: dict[str, ProcessedPictures] = {}  # by the folder of the model, of which there is one
        self._videos = Videos(video_limits, memory.most, self._queue)

    async def plan(
        self,
        files: Sequence[PictureFile],
        *,
        max_tokens: int,
        sequences: int,
        background: Color = WHITE,
        tenant: str = "",
    ) -> PicturePreparation:
        """Read the headers of the pictures and videos of a prompt, which say how many tokens they have.

        Args:
            files: the pictures and videos.
            max_tokens: tokens of the context, which they must not fill.
            sequences: requests to the engine that will have the items.
            background: colour behind transparent pixels.
            tenant: the tenant that sent them; tenants take turns.

        Raises:
            PromptError: a file is not a picture or video, is broken, or is beyond a limit; or all have too many tokens.
            QueueFull: too many pictures wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        preparation = PicturePreparation(self, max_tokens, sequences, background, tenant)
        await preparation.plan(files)
        return preparation

    async def plan_embeddings(
        self, files: Sequence[EmbeddingsFile], *, max_tokens: int, sequences: int, tenant: str = ""
    ) -> EmbeddingsPreparation:
        """Prepare to read pictures whose embeddings are known; the arguments are those of `plan`."""
        sizes = [await asyncio.to_thread(file.content.seek, 0, os.SEEK_END) for file in files]
        return EmbeddingsPreparation(self._pictures, files, sizes, max_tokens, sequences, tenant)

    def start(self, info: PictureInfo | VideoInfo) -> None:
        """Start a process in the background for files of a kind, if there is none, while the first one is read."""
        self._medium_of(info).processes.start()

    async def close(self) -> None:
        """End the processes."""
        media: tuple[Medium, ...] = (self._pictures, self._videos, *self._processed.values())
        await asyncio.gather(*(medium.processes.close() for medium in media))

    def medium(self, file: PictureFile) -> Medium:
        """How a file is prepared."""
        return self._medium_of(file.info)

    def _medium_of(self, info: PictureInfo | VideoInfo) -> Medium:
        if isinstance(info, VideoInfo):
            return self._videos
        geometry = info.geometry
        if not isinstance(geometry, TransformersProcessor):
            return self._pictures
        if geometry.folder not in self._processed:
            self._processed[geometry.folder] = ProcessedPictures(
                geometry.folder, self._limits, self.memory.most, self._queue
            )
        return self._processed[geometry.folder]


class PicturePreparation:
    """The pictures and videos of a prompt; see `Preparation`. The memory is held for as long as the items live."""

    def __init__(self, reader: PictureReader, max_tokens: int, sequences: int, background: Color, tenant: str) -> None:
        """Begin with none. The arguments are those of `PictureReader.plan`."""
        self._reader = reader
        self._max_tokens = max_tokens
        self._sequences = sequences
        self._background = background
        self._tenant = tenant
        self._planned: list[_Planned] = []

    async def plan(self, files: Sequence[PictureFile]) -> None:
        """Read the headers of files; see `PictureReader.plan`."""
        self._planned = await gather_limited(_AT_ONCE, [partial(self._plan, file) for file in files])
        self._check_tokens()

    @property
    def need(self) -> MemoryNeed:
        """The most memory that they take while they are prepared, and in the requests to the engine."""
        results = (1 + self._sequences) * sum(plan.layout.size for plan in self._planned)
        working = sorted((plan.working_memory for plan in self._planned), reverse=True)
        largest = max(self._planned, key=lambda plan: plan.layout.size)
        return MemoryNeed(results + sum(working[:_AT_ONCE]), results, largest.file.where)

    def hear(self, index: int, sound: VideoSound, tokens: int) -> None:
        """Place the sound of a video between its frames.

        Args:
            index: that of the video among the files.
            sound: how the model hears it.
            tokens: number of its tokens.

        Raises:
            PictureError: the model cannot read this video.
        """
        plan = self._planned[index]
        assert isinstance(plan.file.info, VideoInfo)
        assert plan.header is not None
        file = replace(plan.file, info=msgspec.structs.replace(plan.file.info, sound=sound), sound=tokens)
        key = plan.key[0], self._options(file)
        self._planned[index] = replace(plan, file=file, key=key, layout=self._layout(file, plan.header))

    async def run(self, reservation: Reservation) -> list[RequestPicture]:
        """Make items of them.

        Raises:
            NeedsMore: some have left the cache meanwhile; memory for decoding them has to be reserved as well.
            PromptError: a file is broken, or all have too many tokens.
            QueueFull: too many pictures wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        self._check_tokens()  # with those of sound
        cached = [self._find(plan.file, plan.key) for plan in self._planned]
        if not all(plan.header or picture for plan, picture in zip(self._planned, cached, strict=True)):
            raise NeedsMore
        works = [partial(self._picture, *pair) for pair in zip(self._planned, cached, strict=True)]
        pictures = await gather_limited(_AT_ONCE, works)
        copies = 1 + self._sequences
        return [
            _request_picture(plan, picture, reservation, copies)
            for plan, picture in zip(self._planned, pictures, strict=True)
        ]

    async def renew(self) -> None:
        """Read the headers of those that have left the cache."""
        self._planned = await gather_limited(_AT_ONCE, [partial(self._renewed, plan) for plan in self._planned])

    def _check_tokens(self) -> None:
        tokens = 0
        for plan in self._planned:
            tokens += plan.layout.tokens
            if tokens >= self._max_tokens:
                raise PictureError(
                    f"This model's maximum context length is {self._max_tokens} tokens. However, the pictures and "
                    f"videos have {tokens} tokens up to this one, and text and an answer must fit as well.",
                    plan.file.where,
                )

    async def _plan(self, file: PictureFile) -> _Planned:
        key = await self._digest(file), self._options(file)
        cached = None if file.is_heard else self._find(file, key)
        return await self._inspected(file, key) if cached is None else _Planned(file, key, cached.layout)

    async def _renewed(self, plan: _Planned) -> _Planned:
        """The plan, with a header if the picture is to be decoded."""
        if plan.header or self._find(plan.file, plan.key) is not None:
            return plan
        return await self._inspected(plan.file, plan.key)

    async def _inspected(self, file: PictureFile, key: Key) -> _Planned:
        """The plan of a file whose header is read."""
        if file.content is None:
            raise self._unknown(file)
        medium = self._reader.medium(file)
        size = file.content.tell()  # it was read to its end
        needed = _COPIES * size + medium.inspection_memory
        with await self._reader.memory.reserve(needed, self._tenant, file.where):
            job = medium.inspect(await asyncio.to_thread(_content, file.content), file)
            header = await _run(medium, job, file.where, self._tenant)
        if isinstance(medium, ProcessedPictures):
            header = await self._measured(medium, header, file)
        planned = self._layout(file, header)
        between = pixels_between(file.info.geometry, planned, header.height, header.width)
        working_memory = (
            _COPIES * size + medium.working_memory(header) + _BETWEEN_COPIES * between + _RESULT_COPIES * planned.size
        )
        return _Planned(file, key, planned, header, working_memory)

    async def _measured(self, medium: ProcessedPictures, header: PictureHeader, file: PictureFile) -> MeasuredPicture:
        """What becomes of a picture, which the processor tells by a blank one of the same size."""
        assert isinstance(file.info, PictureInfo)
        assert isinstance(file.info.geometry, TransformersProcessor)
        needed = medium.measuring_memory(header, file.info.geometry)
        with await self._reader.memory.reserve(needed, self._tenant, file.where):
            return MeasuredPicture(header, await _run(medium, Measure(header, file.info), file.where, self._tenant))

    def _layout(self, file: PictureFile, header: Header) -> PictureLayout:
        try:
            return self._reader.medium(file).layout(file, header)
        except LayoutError as error:
            raise PictureError(str(error), file.where) from error

    def _options(self, file: PictureFile) -> bytes:
        """A hash of all that what becomes of a file depends on, besides its content."""
        described = (self._reader.medium(file).name, file.info, file.fps, file.sound, self._background)
        return hashlib.sha256(msgspec.json.encode(described)).digest()

    async def _digest(self, file: PictureFile) -> bytes:
        """The hash of a file's content."""
        cache = self._reader.cache
        if file.content is None:
            digest = cache.named(self._tenant, file.name or "")
            if digest is None:
                raise self._unknown(file)
            return digest
        digest = await asyncio.to_thread(_hash, file.content)
        if file.name is not None:
            cache.name(self._tenant, file.name, digest)
        return digest

    def _find(self, file: PictureFile, key: Key) -> PreparedPicture | None:
        """What a file becomes, if it is in the cache, or kept for this request."""
        picture = self._reader.cache.find(key)
        return file.request_cache.find(key) if picture is None and file.request_cache is not None else picture

    def _unknown(self, file: PictureFile) -> PictureError:
        name = self._reader.medium(file).name
        return PictureError(f"The {name} of this `uuid` is not in the cache (any more): send it again.", file.where)

    async def _picture(self, plan: _Planned, cached: PreparedPicture | None) -> PreparedPicture:
        medium, file = self._reader.medium(plan.file), plan.file

        async def make() -> PreparedPicture:
            if file.content is None or plan.header is None:
                raise self._unknown(file)
            job = medium.prepare(await asyncio.to_thread(_content, file.content), file, plan.header, self._background)
            return medium.prepared(plan.layout, await _run(medium, job, file.where, self._tenant))

        try:
            picture, hit = (cached, True) if cached else await self._reader.cache.get(plan.key, make)
        except PromptError as error:
            raise PictureError(str(error), file.where) from error
        self._reader.on_lookup(hit)
        if file.request_cache is not None:
            file.request_cache.keep(plan.key, picture)
        return picture


class EmbeddingsPreparation:
    """The pictures of a prompt whose embeddings are known; see `PicturePreparation`."""

    def __init__(
        self,
        medium: Pictures,
        files: Sequence[EmbeddingsFile],
        sizes: Sequence[int],
        max_tokens: int,
        sequences: int,
        tenant: str,
    ) -> None:
        """Begin.

        Args:
            medium: whose processes read the files.
            files: the embeddings.
            sizes: bytes of each file.
            max_tokens, sequences, tenant: as of `PictureReader.plan`.
        """
        self._medium = medium
        self._files = files
        self._sizes = sizes
        self._max_tokens = max_tokens
        self._copies = 1 + sequences
        self._tenant = tenant

    @property
    def need(self) -> MemoryNeed:
        """The most memory that they take while they are read, and in the requests to the engine."""
        result = 2 * self._copies * sum(self._sizes)  # numbers of 16 bits become such of 32
        working = (_COPIES + 2 * _RESULT_COPIES) * sum(sorted(self._sizes, reverse=True)[:_AT_ONCE])
        return MemoryNeed(result + working, result, self._files[0].where)

    async def run(self, reservation: Reservation) -> list[RequestPicture]:
        """Make items of them.

        Raises:
            PromptError: a file has something else, or does not fit to the model; or all have too many tokens.
            QueueFull: too many wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        pictures = await gather_limited(_AT_ONCE, [partial(self._read, file) for file in self._files])
        tokens = sum(picture.layout.tokens for picture in pictures)
        if tokens >= self._max_tokens:
            raise PictureError(
                f"This model's maximum context length is {self._max_tokens} tokens. However, the pictures have "
                f"{tokens} tokens, and text and an answer must fit as well.",
                self._files[-1].where,
            )
        for picture in pictures:
            for item in picture.items:
                assert item.encoding is not None
                reservation.pass_on(item.encoding, self._copies * item.encoding.nbytes)
        return pictures

    async def renew(self) -> None:
        """Do nothing: files are read anew each time."""

    async def _read(self, file: EmbeddingsFile) -> RequestPicture:
        job = ReadEmbeddings(await asyncio.to_thread(_content, file.content), file.grid)
        values, grid = await _run(self._medium, job, file.where, self._tenant)
        try:
            planned = embeddings_layout(file.info, values, grid)
        except PromptError as error:
            raise PictureError(str(error), file.where) from error
        values.flags.writeable = False
        return RequestPicture(file.info, planned, (await asyncio.to_thread(embeddings_item, values, planned),))


async def _run(medium: Medium, job: Any, where: str, tenant: str) -> Any:
    """The result of a job. `where`: the part that it is for."""
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

"""The contents of content parts: read into files, and documents turned into texts and pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import IO, Literal

from quire.api.chat.media_inputs import MediaInputs
from quire.api.chat.media_parts import MediaPart
from quire.multimodal.documents import DocumentReader, FileKind, Page, recognized, text_of
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory
from quire.multimodal.sources import MediaFile, SentBefore
from quire.protocol.errors import disk_error
from quire.serving.models import ServerState
from quire.workers.concurrency import gather_limited
from quire.workers.tenant import current_tenant

_IN_MEMORY = 1 << 16  # bytes of a file, which are not reserved; larger ones are on disk until they are decoded
_READ_AT_ONCE = 4  # files of a chat
_MAX_CHARACTERS = 1 << 22  # of the texts of all documents of a chat
# Bytes for each of a file that may be a text: the file, and two texts of at most four bytes a character.
_TEXT_COPIES = 9

MediaContent = str | MediaFile | SentBefore  # a text, or what becomes items


class MediaFiles:
    """Files with the contents of a chat's parts, until a context ends. Large ones are on disk."""

    def __init__(self, memory: MediaMemory, stack: ExitStack) -> None:
        """Keep files until `stack` ends. `memory`: for contents while they are read."""
        self._memory = memory
        self._stack = stack

    async def read_all(self, parts: Sequence[MediaPart]) -> list[MediaFile | SentBefore]:
        """Read the content of each part.

        Raises:
            PromptError: one cannot be read.
            QueueFull: there is no memory for too long.
            Unavailable: the disk does not take one.
        """
        return await gather_limited(_READ_AT_ONCE, [partial(self._read, part) for part in parts])

    async def keep(self, content: bytes, where: str) -> MediaFile:
        """Keep a content. `where`: its part.

        Raises:
            Unavailable: the disk does not take it.
        """
        file = self._stack.enter_context(SpooledTemporaryFile(_IN_MEMORY))  # noqa: SIM115 the stack closes it
        try:
            await asyncio.to_thread(_write, file, content)
        except OSError as error:
            raise disk_error(error, "stored", where) from error
        return MediaFile(file, where)

    async def _read(self, part: MediaPart) -> MediaFile | SentBefore:
        where = part.place.where
        if part.source is None:
            return SentBefore(where)
        with await self._memory.reserve(part.source.memory, current_tenant(), where):
            return await self.keep(await part.source.read(), where)


class DocumentContents:
    """What documents become: texts, pictures, videos; of a PDF file a picture of each page if the model reads them."""

    def __init__(self, reads: MediaInputs, state: ServerState, files: MediaFiles) -> None:
        self._reads = reads
        self._documents: DocumentReader = state.documents
        self._memory = state.media_memory
        self._files = files
        self._left = {"picture": state.max_image_parts, "video": state.max_video_parts}
        self._characters_left = _MAX_CHARACTERS

    async def of_parts(
        self, parts: Sequence[MediaPart], files: Sequence[MediaFile | SentBefore]
    ) -> list[list[MediaContent]]:
        """The contents of each part; of one that is no document its file.

        Raises:
            PromptError: a document is broken or too long, or the model does not read its kind.
            QueueFull: too many documents wait.
        """
        self._left["picture"] -= sum(part.place.kind == "image" for part in parts)
        self._left["video"] -= sum(part.place.kind == "video" for part in parts)
        contents: list[list[MediaContent]] = []
        for part, file in zip(parts, files, strict=True):
            if part.place.kind == "document" and isinstance(file, MediaFile):
                contents.append(await self._contents(part, file))
            else:
                contents.append([file])
        return contents

    async def _contents(self, part: MediaPart, file: MediaFile) -> list[MediaContent]:
        where = part.place.where
        size = await asyncio.to_thread(file.size)
        with await self._memory.reserve(_TEXT_COPIES * size, current_tenant(), where):
            kind, text = await asyncio.to_thread(_recognized_text, file)
        match kind:
            case "text":
                return self._with_title(part, [self._checked(text, where)])
            case "picture" if self._reads.pictures is not None:
                self._count("picture", where)
                return self._with_title(part, [file])
            case "video" if self._reads.videos is not None:
                self._count("video", where)
                return self._with_title(part, [replace(file, is_video=True)])
            case "picture" | "video":
                raise PromptError(
                    f"The file is a {kind}, and the model `{self._reads.name}` does not read {kind}s.", where
                )
            case "pdf":
                with await self._memory.reserve(DocumentReader.memory(size), current_tenant(), where):
                    return self._with_title(part, await self._pages(file, where))
        raise PromptError("A file must be a PDF file, a text file in UTF-8, a picture or a video.", where)

    async def _pages(self, file: MediaFile, where: str) -> list[MediaContent]:
        content = await asyncio.to_thread(file.read)
        pictures = None if self._reads.pictures is None else self._left["picture"]
        pages = await self._documents.pages(content, where, pictures=pictures, tenant=current_tenant())
        if pictures is None and not any(page.text for page in pages):
            raise PromptError(
                f"The PDF file has no text, only pictures, which the model `{self._reads.name}` does not read.",
                where,
            )
        contents: list[MediaContent] = []
        for page in pages:
            contents += await self._page(page, where)
        return contents

    async def _page(self, page: Page, where: str) -> list[MediaContent]:
        contents: list[MediaContent] = []
        if page.picture is not None:
            self._count("picture", where)
            contents.append(await self._files.keep(page.picture, where))
        if page.text:
            contents.append(self._checked(page.text, where))
        return contents

    def _count(self, kind: Literal["picture", "video"], where: str) -> None:
        if self._left[kind] < 1:
            flag = {"picture": "--max-image-parts", "video": "--max-video-parts"}[kind]
            raise PromptError(f"The chat has too many {kind}s, with those of its files ({flag}).", where)
        self._left[kind] -= 1

    def _checked(self, text: str, where: str) -> str:
        """A text, with an end: templates join parts without one."""
        self._characters_left -= len(text)
        if self._characters_left < 0:
            raise PromptError(f"The files have more than {_MAX_CHARACTERS} characters of text.", where)
        return f"{text}\n"

    @staticmethod
    def _with_title(part: MediaPart, contents: list[MediaContent]) -> list[MediaContent]:
        return [f"{part.title}\n", *contents] if part.title else contents


def _recognized_text(file: MediaFile) -> tuple[FileKind | None, str]:
    """What a file is, and its text if it is one."""
    content = file.read()
    kind = recognized(content)
    return kind, text_of(content) if kind == "text" else ""


def _write(file: IO[bytes], content: bytes) -> None:
    try:
        file.write(content)
        file.flush()
    except OSError:
        with suppress(OSError):
            file.close()  # which would raise the error again later
        raise

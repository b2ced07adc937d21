"""Documents: the text and the pages of PDF files, read in worker processes; text files."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.options import MediaOptions
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures import formats as picture_formats
from quire.multimodal.videos import formats as video_formats
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool

_PDF_HEADER = b"%PDF-"
_HEADER_WITHIN = 1024  # bytes at the start of a PDF file in which its header may be
_POINTS = 72.0  # in an inch, the unit of a page's size
_DPI = 150.0
_LONGEST_SIDE = 1568  # pixels of a page's picture; more is not read by most models
_MAX_CHARACTERS = 1 << 22  # of the text of a document
_MAX_PICTURES_SIZE = 64 << 20  # bytes of the pictures of all pages
# Processor time in seconds: for a document; to open it and for its first page; for each further page, which may use
# what those before it have left; for a page at most.
_SECONDS = 10.0
_FIRST_SECONDS = 1.5
_NEXT_SECONDS = 0.4
_PAGE_SECONDS = 0.9
_PATIENCE = 1.0  # more than a page takes: one that takes too long is refused before it has low priority
_WORKER_MEMORY = 384 << 20  # bytes, beside the file
_COPIES = 7  # of a file while it is sent: three in this process, four in the worker

FileKind = Literal["pdf", "picture", "text", "video"]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a document: its text, and its picture as a PNG file, if that was asked for."""

    text: str
    picture: bytes | None


@dataclass(frozen=True, slots=True)
class _Job:
    """A PDF file. `pictures`: how many pages of it may become pictures; None: text alone is wanted."""

    content: bytes
    max_pages: int
    pictures: int | None


class DocumentError(Exception):
    """A document cannot be read; the text says why."""


def recognized(content: bytes) -> FileKind | None:
    """What a file is, by its content; None: something else."""
    if _PDF_HEADER in content[:_HEADER_WITHIN]:
        return "pdf"
    if _is_text(content):  # before pictures: a text may begin with "BM" as a BMP file does
        return "text"
    if picture_formats.recognize(content) is not None:  # before videos: a GIF file is a picture
        return "picture"
    return "video" if video_formats.is_video(content) else None


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def text_of(content: bytes) -> str:
    """The text of a file that is `recognized` as text."""
    return content.decode("utf-8-sig")


class DocumentReader:
    """Read PDF files in worker processes: PDFium is native code, and the files come from strangers."""

    def __init__(self, options: MediaOptions, *, max_queued: int = 1024, share: float = 1.0) -> None:
        """Prepare; the first file starts a process.

        Args:
            options: limits of files.
            max_queued: files that may wait for a process.
            share: the largest part of these for one tenant; see `Shares`.
        """
        self._max_pages = options.max_document_pages
        self._processes = WorkerPool(
            "documents",
            "quire.multimodal.documents:worker",
            (),
            WorkerLimits(memory=_WORKER_MEMORY + 4 * int(options.max_document_size), seconds=_SECONDS, stack=1 << 24),
            size=1,
            max_queued=max_queued,
            share=share,
            patience=_PATIENCE,
        )

    @staticmethod
    def memory(size: int) -> int:
        """Bytes that reading a file of this size takes at most in this process and in the worker's, with the result."""
        return _COPIES * size + 2 * _MAX_PICTURES_SIZE

    async def pages(self, content: bytes, where: str, *, pictures: int | None, tenant: str = "") -> list[Page]:
        """Read a PDF file.

        Args:
            content: the file.
            where: its content part, for errors.
            pictures: how many pages may become pictures; None: only text is read.
            tenant: the tenant that sent it; tenants take turns.

        Raises:
            PromptError: it is broken, encrypted, too long, or takes too much time or memory.
            QueueFull: too many files wait.
            WorkerError: processes cannot be started.
        """
        try:
            pages: list[Page] = await self._processes.run(_Job(content, self._max_pages, pictures), tenant=tenant)
        except DocumentError as error:
            raise PromptError(str(error), where) from error
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull("the document waited too long for processor time") from error
            raise PromptError("The PDF file takes too much time to read.", where) from error
        except JobKilled as error:
            raise PromptError(f"The PDF file cannot be read: {error}.", where) from error
        return pages

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()


def worker() -> Callable[[_Job], list[Page]]:
    """The function of a worker process."""
    import pypdfium2  # noqa: PLC0415 native code that this process alone runs

    return lambda job: list(_read(job, pypdfium2))


def _read(job: _Job, pdfium: Any) -> Iterator[Page]:
    start = time.process_time()
    _limit_time(start, 0)
    try:
        document = pdfium.PdfDocument(job.content)
    except pdfium.PdfiumError as error:
        encrypted = "password" in str(error).lower()
        raise DocumentError(
            "The PDF file is protected by a password." if encrypted else "The PDF file is broken."
        ) from error
    count = len(document)
    if not count:
        raise DocumentError("The PDF file has no pages.")
    if count > job.max_pages:
        raise DocumentError(
            f"The PDF file has {count} pages; at most {job.max_pages} are allowed (--max-document-pages)."
        )
    if job.pictures is not None and count > job.pictures:
        raise DocumentError(
            f"The PDF file has {count} pages, which become pictures, and only {job.pictures} more pictures are allowed "
            "in a chat (--max-image-parts)."
        )
    characters = size = 0
    for index in range(count):
        _limit_time(start, index)
        try:
            page = document[index]
            text = _text(page)
            picture = None if job.pictures is None else _picture(page)
            page.close()
        except pdfium.PdfiumError as error:
            raise DocumentError(f"Page {index + 1} of the PDF file is broken.") from error
        characters += len(text)
        size += len(picture or b"")
        if characters > _MAX_CHARACTERS or size > _MAX_PICTURES_SIZE:
            raise DocumentError("The PDF file has too much content.")
        yield Page(text, picture)


def _limit_time(start: float, before: int) -> None:
    """Let the kernel end this process (SIGPROF) if the next page takes too long.

    Args:
        start: processor time when the document was opened.
        before: pages before it.
    """
    end = start + min(_SECONDS, _FIRST_SECONDS + _NEXT_SECONDS * before)
    signal.setitimer(signal.ITIMER_PROF, max(0.001, min(_PAGE_SECONDS, end - time.process_time())))


def _text(page: Any) -> str:
    """The text of a page, in the order of its content stream, without NUL and lone surrogates."""
    reader = page.get_textpage()
    if reader.count_chars() > _MAX_CHARACTERS:
        raise DocumentError("The PDF file has too much content.")
    text: str = reader.get_text_bounded(errors="ignore")
    reader.close()
    lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def _picture(page: Any) -> bytes:
    """A page as a PNG file."""
    longest = max(page.get_size()) or 1.0
    scale = min(_DPI / _POINTS, _LONGEST_SIDE / longest)
    bitmap = page.render(scale=scale, rev_byteorder=True, fill_color=(255, 255, 255, 255))
    file = io.BytesIO()
    bitmap.to_pil().convert("RGB").save(file, "PNG", compress_level=1)
    bitmap.close()
    return file.getvalue()

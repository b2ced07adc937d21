"""Where media in messages come from: URLs, base64 and uploaded files, within the operator's policy."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from quire.config.options import AudioOptions, MediaOptions, VideoOptions
from quire.multimodal.errors import PromptError
from quire.multimodal.file_store import FileStore
from quire.multimodal.size_limit import SizeLimit, shown
from quire.multimodal.videos.formats import packed
from quire.workers.tenant import current_owner

if TYPE_CHECKING:  # it imports httpx
    from quire.multimodal.fetch import Fetcher

_LONGEST_SCHEME = 8  # characters, with the colon
_FRAMES = "data:video/jpeg;base64"  # in front of frames in base64, with commas between: vLLM's form of a video
_MOST_FRAMES = 1 << 14
_PART = 1 << 19  # characters of base64 that are decoded at once, which takes a millisecond or two


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where the content of a part comes from.

    Attributes:
        read: fetches or decodes the content.
        memory: bytes that `read` takes at most, with its result.
        is_frames: it is a video that is sent as a list of frames.
    """

    read: Callable[[], Awaitable[bytes]]
    memory: int
    is_frames: bool = False


@dataclass(frozen=True, slots=True)
class MediaFile:
    """The content of a part in a file.

    Attributes:
        content: the file, which is at its end.
        where: the part, for errors.
        is_video: a file of any kind has turned out to be a video.
    """

    content: IO[bytes]
    where: str
    is_video: bool = False

    def size(self) -> int:
        """Number of its bytes."""
        return self.content.seek(0, os.SEEK_END)

    def read(self) -> bytes:
        """Read all of it."""
        self.content.seek(0)
        return self.content.read()


@dataclass(frozen=True, slots=True)
class SentBefore:
    """Content that an earlier request has sent and named, and the part that refers to it, for errors."""

    where: str


class MediaSources:
    """Return the sources of media. Data URLs are always allowed, others only if configured.

    Attributes:
        audio, image, video, document: limits of their content.
        files: those that clients have uploaded.
        embeddings: embeddings that clients have computed are accepted.
    """

    def __init__(self, options: MediaOptions, audio: AudioOptions, video: VideoOptions, share: float = 1.0) -> None:
        """Prepare; nothing is started. `share`: see `Fetcher` and `FileStore`."""
        self.audio = SizeLimit(int(audio.max_audio_size), "--max-audio-size")
        self.image = SizeLimit(int(options.max_image_size), "--max-image-size")
        self.video = SizeLimit(int(video.max_video_size), "--max-video-size")
        self.document = SizeLimit(int(options.max_document_size), "--max-document-size")
        self.embeddings = options.enable_mm_embeds
        self._folder = options.allowed_local_media_path
        self.files = FileStore(int(options.file_store_size), options.file_ttl, share)
        self._fetcher = _fetcher(options, share) if options.allowed_media_domains else None

    def from_url(self, url: str, limit: SizeLimit, where: str) -> MediaSource:
        """Check a URL without fetching it.

        Args:
            url: URL of a content part.
            limit: limit of its content.
            where: the content part, for errors.

        Raises:
            PromptError: it is not allowed.
        """
        scheme = url[:_LONGEST_SCHEME].partition(":")[0].lower()
        if scheme == "data":
            frames = url[: len(_FRAMES)].lower() == _FRAMES
            return MediaSource(lambda: asyncio.to_thread(_from_data_url, url, limit, where), 3 * len(url), frames)
        if scheme in ("http", "https"):
            fetcher = self._fetcher
            if fetcher is None:
                raise PromptError(
                    "This server fetches no URLs: send the content as a data URL, or start the server with "
                    "--allowed-media-domains.",
                    where,
                )
            address = fetcher.checked(url, where)
            return MediaSource(lambda: fetcher.fetch(address, limit, where), 2 * limit.size)
        if scheme == "file":
            path = _checked_path(url, self._folder, where)
            return MediaSource(lambda: asyncio.to_thread(_read_file, path, limit, where), limit.size)
        raise PromptError(f"The URL {shown(url)} must be a data, http, https or file URL.", where)

    def from_base64(self, text: str, limit: SizeLimit, where: str) -> MediaSource:
        """The source of content that a text encodes: base64, or a data URL."""
        if text[:5].lower() == "data:":
            return self.from_url(text, limit, where)
        return MediaSource(lambda: asyncio.to_thread(_decode_base64, text, limit, where), 2 * len(text))

    def from_file_id(self, identifier: str, limit: SizeLimit, where: str) -> tuple[MediaSource, str]:
        """The source of an uploaded file, and its name.

        Raises:
            PromptError: the client has no such file, or it is too large.
        """
        file = self.files.find(identifier, current_owner())
        if file is None:
            raise PromptError(f"There is no file {shown(identifier)}; files are uploaded to /v1/files.", where)
        if file.size > limit.size:
            raise limit.refusal("The file is", where)
        return MediaSource(lambda: asyncio.to_thread(_read_file, file.path, limit, where), file.size), file.name

    def close(self) -> None:
        """End the threads that look up names, and delete uploaded files."""
        self.files.close()
        if self._fetcher is not None:
            self._fetcher.close()


def _fetcher(options: MediaOptions, share: float) -> Fetcher:
    """What fetches URLs."""
    from quire.multimodal.fetch import Fetcher  # noqa: PLC0415 imports httpx, for servers that fetch only

    return Fetcher(
        frozenset(name.lower() for name in options.allowed_media_domains),
        private_addresses=options.allow_private_media_addresses,
        max_redirects=options.max_media_redirects,
        seconds=options.media_fetch_timeout,
        share=share,
    )


def _decode_base64(text: str, limit: SizeLimit, where: str) -> bytes:
    """The bytes that a text encodes. It may be megabytes long.

    Raises:
        PromptError: it is not base64, empty, or too long.
    """
    if len(text) // 4 * 3 > limit.size + 3:
        raise limit.refusal("The content is", where)
    try:
        content = b"".join(_decoded_parts(text))
    except (binascii.Error, UnicodeEncodeError) as error:
        reason = str(error) if isinstance(error, binascii.Error) else "it has characters beyond ASCII"
        raise PromptError(f"The content is not valid base64: {reason}.", where) from error
    if not content:
        raise PromptError("The content is empty.", where)
    return content


def _decoded_parts(text: str) -> Iterator[bytes]:
    """The bytes that base64 encodes, in parts: the interpreter is locked while one is decoded."""
    for start in range(0, len(text), _PART):
        part = base64.b64decode(text[start : start + _PART].encode("ascii"), validate=True)
        if len(part) < _PART // 4 * 3 and start + _PART < len(text):
            raise binascii.Error("Excess data after padding")
        yield part


def _from_data_url(url: str, limit: SizeLimit, where: str) -> bytes:
    head, comma, text = url.partition(",")
    if head.lower() == _FRAMES:
        return _frames(text, limit, where)
    if not comma or not head.lower().endswith(";base64"):
        raise PromptError("A data URL must be of the form data:TYPE;base64,CONTENT.", where)
    return _decode_base64(text, limit, where)


def _frames(text: str, limit: SizeLimit, where: str) -> bytes:
    """The frames of a video, each in base64."""
    count = text.count(",") + 1
    if count > _MOST_FRAMES:
        raise PromptError(f"The video has {count} frames; at most {_MOST_FRAMES} are accepted.", where)
    if len(text) // 4 * 3 > limit.size:
        raise limit.refusal("The content is", where)
    return packed([_decode_base64(frame, limit, where) for frame in text.split(",")])


def _checked_path(url: str, folder: Path | None, where: str) -> Path:
    if folder is None:
        raise PromptError("This server reads no files: it was started without --allowed-local-media-path.", where)
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        inside = parts.netloc in ("", "localhost") and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a path with NUL, or a loop of links
        raise PromptError(f"The URL {shown(url)} is not valid.", where) from error
    if not inside:
        raise PromptError("The file is not in the directory of --allowed-local-media-path.", where)
    return path.resolve()


def _read_file(path: Path, limit: SizeLimit, where: str) -> bytes:
    try:
        # The last component is no link: the path was resolved. Without waiting, if it is a pipe.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            content = file.read(limit.size + 1)
    except OSError as error:
        raise PromptError("The file cannot be read.", where) from error
    if len(content) > limit.size:
        raise limit.refusal("The file is", where)
    return content

"""Files that clients have uploaded, to name them in messages: in a temporary directory, as long as the server runs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quire.workers.errors import QueueFull, ShareExceeded
from quire.workers.shares import Shares

logger = logging.getLogger(__name__)
_MAX_FILES = 1 << 12
_RETRY_AFTER = 60  # seconds


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the store.

    Attributes:
        size: number of its bytes.
        expires_at: seconds since 1970; None: never.
        owner: who may use it; see `owner_of`.
        tenant: whose share of the store it takes.
        path: where its content is.
    """

    id: str
    name: str
    purpose: str
    size: int
    created_at: int
    expires_at: int | None
    owner: str
    tenant: str
    path: Path


class FileStore:
    """Keep uploaded files, within a number of bytes that tenants share. For one event loop."""

    def __init__(self, limit: int, seconds: float, share: float = 1.0) -> None:
        """Begin with no files.

        Args:
            limit: bytes of all files; 0: none are kept.
            seconds: for which a file is kept if its client does not say so; 0: as long as the server runs.
            share: the largest part of the bytes for one tenant; see `Shares`.
        """
        self._bytes, self._places = Shares(limit, share), Shares(_MAX_FILES, share)
        self._seconds = seconds
        self._files: dict[str, StoredFile] = {}
        self._folder: Path | None = None
        self._making_folder = threading.Lock()
        self._closed = False
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def limit(self) -> int:
        """Bytes that all files may have."""
        return self._bytes.capacity

    @property
    def largest(self) -> int:
        """Bytes that a file may have: a tenant that is alone may store so much."""
        return self._bytes.most

    async def add(
        self, content: IO[bytes], size: int, *, name: str, purpose: str, owner: str, tenant: str, seconds: int | None
    ) -> StoredFile:
        """Keep a copy of a content.

        Args:
            content: the content.
            size: number of its bytes.
            name, purpose: as the client says.
            owner, tenant: see `StoredFile`.
            seconds: for which it is kept; None: for as long as others.

        Raises:
            QueueFull: there is no room.
            ShareExceeded: the tenant has its share.
            OSError: it cannot be written; the disk may be full.
        """
        self._forget_expired()
        if self._removals and (self._bytes.refusal(tenant, size) or self._places.refusal(tenant)):
            await asyncio.wait(self._removals)
        self._check(size, tenant)
        self._bytes.take(tenant, size)
        self._places.take(tenant)
        identifier = f"file-{secrets.token_hex(16)}"
        copying = asyncio.create_task(asyncio.to_thread(self._copy, content, identifier))
        try:
            path = await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The thread goes on. What it has written takes room until it is deleted.
            self._remove_later(self._discard(copying, tenant, size))
            raise
        except BaseException:
            self._give_back(tenant, size)
            raise
        now = int(time.time())
        lifetime = self._seconds if seconds is None else seconds
        expires_at = now + int(lifetime) if lifetime else None
        file = StoredFile(identifier, name, purpose, size, now, expires_at, owner, tenant, path)
        self._files[identifier] = file
        return file

    def find(self, identifier: str, owner: str) -> StoredFile | None:
        """A file of an owner; None if there is none (any more)."""
        self._forget_expired()
        file = self._files.get(identifier)
        return file if file is not None and file.owner == owner else None

    def files(self, owner: str) -> list[StoredFile]:
        """The files of an owner, oldest first."""
        self._forget_expired()
        return [file for file in self._files.values() if file.owner == owner]

    async def delete(self, file: StoredFile) -> None:
        """Forget a file. Who reads it already can do so to its end."""
        if self._files.pop(file.id, None) is not None:
            await asyncio.shield(self._remove_later(self._remove([file])))

    def close(self) -> None:
        """Delete all files. Copies that are still being written fail."""
        with self._making_folder:
            self._closed = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._files.clear()

    def _copy(self, content: IO[bytes], name: str) -> Path:
        """Write a content into a file of the folder, which leaves nothing behind if it fails."""
        with self._making_folder:
            if self._closed:
                raise OSError("the server is shutting down")
            if self._folder is None or not self._folder.exists():  # a cleaner of temporary files may have deleted it
                self._folder = Path(tempfile.mkdtemp(prefix="quire-files-"))
            path = self._folder / name
        try:
            content.seek(0)
            with path.open("xb") as file:
                shutil.copyfileobj(content, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def _discard(self, copying: asyncio.Task[Path], tenant: str, size: int) -> None:
        """Delete what a thread writes for a client that has gone, once the thread has ended."""
        await asyncio.wait((copying,))
        if not copying.cancelled() and copying.exception() is None:
            await asyncio.to_thread(_unlink, (copying.result(),))
        self._give_back(tenant, size)

    async def _remove(self, files: Sequence[StoredFile]) -> None:
        await asyncio.to_thread(_unlink, [file.path for file in files])
        for file in files:
            self._give_back(file.tenant, file.size)

    def _remove_later(self, removal: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a removal, for which the next upload waits, so that there is the room that it leaves."""
        task = asyncio.create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    def _give_back(self, tenant: str, size: int) -> None:
        self._bytes.give_back(tenant, size)
        self._places.give_back(tenant)

    def _check(self, size: int, tenant: str) -> None:
        files, bytes_ = self._places, self._bytes
        if files.refusal(tenant) == "full" or bytes_.refusal(tenant, size) == "full":
            raise QueueFull(
                f"{files.used} of at most {files.capacity} files take {bytes_.used} of {self.limit} bytes "
                "(--file-store-size); files may be deleted",
                retry_after=_RETRY_AFTER,
            )
        if files.refusal(tenant) == "share" or bytes_.refusal(tenant, size) == "share":
            raise ShareExceeded(
                f"the client has {files.held(tenant)} of the {files.limit(tenant)} files, and {bytes_.held(tenant)} of "
                f"the {bytes_.limit(tenant)} bytes, that it may have at the moment (--max-client-share of "
                "--file-store-size)",
                retry_after=_RETRY_AFTER,
            )

    def _forget_expired(self) -> None:
        now = time.time()
        expired = [file for file in self._files.values() if file.expires_at is not None and file.expires_at <= now]
        for file in expired:
            del self._files[file.id]
        if expired:
            self._remove_later(self._remove(expired))


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("an uploaded file cannot be deleted: %s", error)

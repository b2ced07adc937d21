"""Files that clients have uploaded, to name them in messages: in a temporary directory, as long as the server runs."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire.workers.errors import QueueFull, ShareExceeded
from quire.workers.shares import Shares

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

    @property
    def limit(self) -> int:
        """Bytes that all files may have."""
        return self._bytes.capacity

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
        """
        self._check(size, tenant)
        self._take(tenant, size)
        folder = self._folder = self._folder or Path(tempfile.mkdtemp(prefix="quire-files-"))
        identifier = f"file-{secrets.token_hex(16)}"
        path = folder / identifier
        try:
            await asyncio.to_thread(_copy, content, path)
        except BaseException:
            self._give_back(tenant, size)
            path.unlink(missing_ok=True)
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

    def delete(self, file: StoredFile) -> None:
        """Forget a file. Who reads it already can do so to its end."""
        if self._files.pop(file.id, None) is not None:
            self._give_back(file.tenant, file.size)
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._files.clear()

    def _take(self, tenant: str, size: int) -> None:
        self._bytes.take(tenant, size)
        self._places.take(tenant)

    def _give_back(self, tenant: str, size: int) -> None:
        self._bytes.give_back(tenant, size)
        self._places.give_back(tenant)

    def _check(self, size: int, tenant: str) -> None:
        self._forget_expired()
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
        for file in list(self._files.values()):
            if file.expires_at is not None and file.expires_at <= now:
                self.delete(file)


def _copy(content: IO[bytes], path: Path) -> None:
    content.seek(0)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)

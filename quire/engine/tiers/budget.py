"""FolderBudget: a bound of the bytes in a folder, which several processes keep together."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from quire.engine.tiers.records import disk_bytes

SUFFIX, UNFINISHED = ".kv", ".unfinished"
_COUNT = struct.Struct("<q")
_LEFT = 0.9  # share of the bound that is left after files were removed, so that not each new file removes another one
_PATIENCE, _LOOK = 0.5, 0.002  # seconds that the lock is waited for, and between two attempts


class FolderBusy(Exception):
    """Another process holds the lock of a folder for too long."""


class StoredFile(NamedTuple):
    """A file of a folder: when it was used, in nanoseconds, and the bytes that it takes."""

    used: int
    nbytes: int
    path: str


class FolderBudget:
    """The bytes of all blocks in a folder of several models and processes.

    Files are written under the lock of the folder, and counted in the file of the lock before they are. So a process
    that dies leaves a count that may be too high, never too low, and unfinished files that nobody else writes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Count the files. Those that are too many for this limit are removed, and unfinished ones.

        Args:
            folder: with a folder for each model, which have folders of files; it exists.
            limit: bytes of all files together.

        Raises:
            OSError: nothing can be written there.
            FolderBusy: another process holds the lock for too long.
        """
        self._folder = folder
        self.limit = limit
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._locked():
                self._make_room(0)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes that all files together take."""
        content = os.pread(self._lock, _COUNT.size, 0)
        return int(_COUNT.unpack(content)[0]) if len(content) == _COUNT.size else 0

    def add(self, nbytes: int, write: Callable[[], None]) -> list[str]:
        """Write a file of so many bytes, at most the limit; returns the files that were removed for it.

        Raises:
            FolderBusy: another process holds the lock for too long.
            OSError: `write` has raised it; nothing is counted then.
        """
        removed: list[str] = []
        with self._locked():
            if self.nbytes + nbytes > self.limit:
                removed = self._make_room(nbytes)
            before = self.nbytes
            self._write(before + nbytes)
            try:
                write()
            except OSError:
                self._write(before)
                raise
        return removed

    def remove(self, files: Iterable[Path]) -> None:
        """Remove files, which may not be there, also while another process holds the lock: the count is too high then.

        Raises:
            OSError: one cannot be removed.
        """
        paths = list(files)
        try:
            with self._locked():
                for path in paths:
                    with suppress(FileNotFoundError):
                        size = path.stat().st_size
                        path.unlink()
                        self._write(max(0, self.nbytes - disk_bytes(size)))
        except FolderBusy:
            for path in paths:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file of the count."""
        os.close(self._lock)

    def _make_room(self, needed: int) -> list[str]:
        """Count the files, and remove those that are too many, used least recently; unfinished ones have no writer."""
        files, removed = list[StoredFile](), list[str]()
        for file in stored_files(self._folder):
            if file.path.endswith(UNFINISHED):
                _remove(file.path)
            else:
                files.append(file)
        taken = sum(file.nbytes for file in files)
        if taken + needed > self.limit:
            most = min(int(self.limit * _LEFT), self.limit - needed)
            for file in sorted(files):
                if taken <= most:
                    break
                _remove(file.path)
                removed.append(file.path)
                taken -= file.nbytes
        self._write(taken)
        return removed

    def _write(self, count: int) -> None:
        os.pwrite(self._lock, _COUNT.pack(count), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FolderBusy("another process holds the lock of the folder") from None
                time.sleep(_LOOK)
            else:
                break
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def stored_files(folder: Path) -> Iterator[StoredFile]:
    """Return the files of blocks in a folder of models, unfinished ones included."""
    for model in _folders(folder):
        yield from files_of_model(model)


def files_of_model(folder: str) -> Iterator[StoredFile]:
    """Return the files of blocks of one model."""
    for part in _folders(folder):
        with suppress(FileNotFoundError), os.scandir(part) as entries:
            for entry in entries:
                if entry.name.endswith((SUFFIX, UNFINISHED)):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(status.st_mtime_ns, disk_bytes(status.st_size), entry.path)


def _remove(path: str) -> None:
    """Remove a file, which another process or an operator may have removed."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def _folders(folder: Path | str) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []

"""DiskTier: blocks in the files of a folder, which survive the server and may be shared by several."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from typing_extensions import Buffer, override

from quire.engine.tiers.budget import SUFFIX, UNFINISHED, FolderBudget, FolderBusy
from quire.engine.tiers.records import DamagedRecord, file_bytes, read_record, record_bytes, write_record
from quire.engine.tiers.tier import Tier

logger = logging.getLogger(__name__)
_PAUSE = 30.0  # seconds without an attempt to write after one has failed
_LEFT_FREE = 1 << 30  # bytes of the disk; a tier that may take less leaves less
_PARTS = frozenset(f"{index:02x}" for index in range(256))  # names of the parts of a folder


class DiskTier(Tier):
    """The blocks of one model, each in a file with the name of its key.

    Files are written under other names and renamed once they are whole, so that nobody sees a part of one. What a crash
    of the machine leaves is noticed by its size or its checksum, and removed.
    """

    def __init__(self, folder: Path, model: str, block_bytes: int, limit: int) -> None:
        """Find the blocks that are there.

        Args:
            folder: of several models and servers; it is made if it does not exist.
            model: a name that no other model, and no other format of its blocks, has.
            block_bytes: the bytes of each block.
            limit: bytes that the files of all models together may take.

        Raises:
            OSError: nothing can be written there.
            FolderBusy: another process holds the lock of the folder for too long.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder / model
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._block_bytes = block_bytes
        self._keys: list[set[bytes]] = [set() for _ in range(256)]  # by the first byte
        self._removed: list[bytes] = []  # that `take_removed` returns
        self._times: dict[str, int] = {}  # when the parts of the folder were read, as they were then
        self._no_writes_before = 0.0
        self._budget = FolderBudget(folder, limit)
        self.refresh()

    @property
    @override
    def nbytes(self) -> int:
        return self._budget.nbytes

    @override
    def has(self, key: bytes) -> bool:
        return key in self._keys[key[0]]

    @override
    def get(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            content = read_record(path, key)
            if len(content) == self._block_bytes:
                return content
            raise DamagedRecord("it has another length")
        except FileNotFoundError:
            self._lose([key])
        except OSError as error:
            logger.warning("a block of the prefix cache cannot be read: %s", error)
            self._lose([key])
        except DamagedRecord as error:
            logger.warning("a damaged block of the prefix cache is removed: %s: %s", path, error)
            self.evict([key])
        return None

    @override
    def put(self, key: bytes, data: Buffer) -> bool:
        path, nbytes = self._path(key), record_bytes(self._block_bytes)
        if self.has(key) or path.exists():
            self._keys[key[0]].add(key)
            return True
        if nbytes > self._budget.limit or time.monotonic() < self._no_writes_before:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may have removed the model's
            left = min(_LEFT_FREE, self._budget.limit)
            if shutil.disk_usage(path.parent).free < nbytes + left:
                raise OSError(f"less than {left >> 10} KiB of the disk are free")
            self._forget(self._budget.add(nbytes, lambda: self._write(path, key, data)))
        except (OSError, FolderBusy) as error:
            logger.warning("blocks of the prefix cache are not written for %.0f s: %s", _PAUSE, error)
            self._no_writes_before = time.monotonic() + _PAUSE
            return False
        self._keys[key[0]].add(key)
        return True

    @override
    def touch(self, keys: Iterable[bytes]) -> None:
        now = time.time()
        for key in keys:
            with suppress(OSError):
                os.utime(self._path(key), (now, now))

    @override
    def evict(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._lose(keys)
        self._remove(map(self._path, keys))

    @override
    def clear(self) -> None:
        self.refresh()
        self.evict(set().union(*self._keys))

    @override
    def take_removed(self) -> list[bytes]:
        removed, self._removed = self._removed, []
        return removed

    @override
    def refresh(self) -> None:
        try:
            parts = [entry for entry in os.scandir(self._folder) if entry.name in _PARTS]
        except OSError as error:
            logger.warning("blocks of the prefix cache cannot be found: %s", error)
            return
        for part in parts:
            try:
                changed = part.stat().st_mtime_ns
                if self._times.get(part.name) != changed:
                    self._times[part.name] = changed
                    self._read(part)
            except FileNotFoundError:
                self._lose([*self._keys[int(part.name, 16)]])
            except OSError as error:
                logger.warning("blocks of the prefix cache cannot be found: %s", error)

    @override
    def close(self) -> None:
        self._budget.close()

    def _read(self, part: os.DirEntry[str]) -> None:
        """Find the blocks in a part of the folder; files of other sizes are not whole, and are removed."""
        keys, torn = set[bytes](), list[Path]()
        for entry in os.scandir(part):
            key = _key(entry.name)
            if key is None or part.name != _part(key):
                continue
            with suppress(FileNotFoundError):
                if entry.stat().st_size == file_bytes(self._block_bytes):
                    keys.add(key)
                else:
                    torn.append(Path(entry.path))
        if torn:
            logger.warning("%d damaged blocks of the prefix cache are removed from %s", len(torn), self._folder)
            self._remove(torn)
        index = int(part.name, 16)
        self._lose(self._keys[index] - keys)
        self._keys[index] = keys

    def _remove(self, files: Iterable[Path]) -> None:
        try:
            self._budget.remove(files)
        except OSError as error:
            logger.warning("blocks of the prefix cache could not be removed: %s", error)

    def _forget(self, files: Iterable[str]) -> None:
        """Note that files were removed, of which others are other models'."""
        for path in map(Path, files):
            if path.parent.parent == self._folder and (key := _key(path.name)) is not None:
                self._lose([key])

    def _lose(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are not there any more."""
        for key in keys:
            self._keys[key[0]].discard(key)
            self._removed.append(key)

    def _write(self, path: Path, key: bytes, data: Buffer) -> None:
        unfinished = path.with_suffix(UNFINISHED)
        try:
            write_record(unfinished, key, data)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _path(self, key: bytes) -> Path:
        return self._folder / _part(key) / (key.hex() + SUFFIX)


def _part(key: bytes) -> str:
    """Return the name of the part of the folder that a block is in."""
    return key[:1].hex()


def _key(name: str) -> bytes | None:
    """Return the key of the block in a file; None: it is not one."""
    stem, suffix = os.path.splitext(name)
    with suppress(ValueError):
        return bytes.fromhex(stem) if suffix == SUFFIX else None
    return None

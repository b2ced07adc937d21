"""PackedCache: packed weights of models in files, which are read when a model starts again.

A file has the packed weights of one model, as one rank loads it: their tensors, then an index in JSON, its digest and
its length. It is written beside the others under a name of its own, with a lock that tells that it has a writer, and
renamed once it is whole, so that nobody sees half of one.

A file is read into huge pages of the process instead of being mapped. Whether the kernel keeps a file in huge pages
depends on the file system and on free memory; and it drops pages of files that were idle when memory is short.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import quire
from quire.kernels import native
from quire.kernels.huge_pages import map_huge_pages
from quire.kernels.linear import SAVED_KINDS, SavableWeight
from quire.kernels.saved_weight import SavedWeight

logger = logging.getLogger(__name__)
_SUFFIX, _UNFINISHED = ".weights", ".unfinished"
_ALIGNMENT = mmap.PAGESIZE
_PART = 16 << 20  # bytes of a file that a thread reads at a time
_END = struct.Struct("<32sQ8s")  # digest and length of the index, and what the file is
_MAGIC = b"quirepw1"
_LOCKED = 10.0  # seconds without a write after which an unfinished file without a lock has no writer
_ABANDONED = 3600.0  # the same where files have no locks
_SAMPLES, _SAMPLE = 64, 4096  # pieces of a file that are read to know it again, and their bytes
_CODE = ("kernels", "engine/models")  # what reads and packs weights
_LOST = 1 << 30  # bytes of the disk that are left free


class PackedCache:
    """A directory of files with packed weights. Those that were used last are kept."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`folder`: it exists. `limit`: bytes of all files together."""
        self._folder = folder
        self._limit = limit

    def open(self, key: str) -> CachedWeights | None:
        """The weights with a key; None: there are none, or they cannot be read."""
        path = self._folder / (key + _SUFFIX)
        try:
            weights = CachedWeights(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            logger.warning("packed weights in %s cannot be used, and are removed: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        return weights

    def create(self, key: str, expected: int) -> WrittenWeights | None:
        """A new file for the weights with a key; None: there is no room for it. `expected`: bytes, roughly."""
        if expected > self._limit or shutil.disk_usage(self._folder).free < expected + _LOST:
            logger.info("packed weights are not cached: there is no room for %d MiB", expected >> 20)
            return None
        self._make_room(expected)
        try:
            return WrittenWeights(self, self._folder / (key + _SUFFIX))
        except OSError as error:
            logger.warning("packed weights cannot be cached in %s: %s", self._folder, error)
            return None

    def add(self, unfinished: Path, path: Path) -> None:
        """Give a whole file its name, once there is room for it. Another process may have been faster."""
        if path.exists():
            unfinished.unlink()
            return
        self._make_room(unfinished.stat().st_size)
        unfinished.rename(path)

    def room(self) -> int:
        """The bytes that a file may have."""
        return min(self._limit, max(0, shutil.disk_usage(self._folder).free - _LOST))

    def _make_room(self, needed: int) -> None:
        """Remove files without a writer, and the least recently used. Processes that have read one keep its weights."""
        files = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process removes it
                status = path.stat()
                if path.name.endswith(_SUFFIX):
                    files.append((status.st_mtime, status.st_size, path))
                elif path.name.endswith(_UNFINISHED) and _is_abandoned(path, time.time() - status.st_mtime):
                    path.unlink()
        taken = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if taken + needed <= self._limit:
                return
            with suppress(OSError):
                path.unlink()
            taken -= size


class CachedWeights:
    """The packed weights in a file, read into memory, by the names of their parameters."""

    def __init__(self, path: Path) -> None:
        """Read a file.

        Raises:
            OSError, ValueError, KeyError, TypeError, struct.error: it cannot be read, or is damaged.
        """
        with path.open("rb") as file:
            size, self._entries = _read_index(file)
            self._memory = map_huge_pages(size)
            _read_into(self._memory, file)

    def has(self, parameter: str, shape: Iterable[int]) -> bool:
        """Whether the weight of a parameter is there."""
        entry = self._entries.get(parameter)
        return entry is not None and entry["shape"] == [*shape]

    def weight(self, parameter: str) -> SavableWeight:
        """The weight of a parameter. Its tensors are parts of the memory of all."""
        entry = self._entries[parameter]
        tensors = {name: self._tensor(*place) for name, place in entry["tensors"].items()}
        return SAVED_KINDS[entry["kind"]].restored(SavedWeight(entry["kind"], entry["facts"], tensors))

    def _tensor(self, dtype: str, shape: list[int], begin: int) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        return self._memory[begin : begin + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def _read_index(file: BinaryIO) -> tuple[int, Mapping[str, Any]]:
    """Return the bytes of the tensors in a file, and its index.

    Raises:
        OSError, ValueError, struct.error: it cannot be read, or is damaged.
    """
    end = file.seek(0, os.SEEK_END) - _END.size
    file.seek(max(0, end))
    digest, length, magic = _END.unpack(file.read())
    file.seek(max(0, end - length))
    index = file.read(min(length, end))
    if magic != _MAGIC or hashlib.sha256(index).digest() != digest:
        raise ValueError("it is damaged")
    return end - length, json.loads(index)


def _read_into(memory: Tensor, file: BinaryIO) -> None:
    """Fill memory with the beginning of a file, with as many threads as compute.

    Args:
        memory: (bytes,) uint8.
        file: of more bytes than that.

    Raises:
        OSError, ValueError: it cannot be read, or became shorter.
    """
    view = memory.numpy().data

    def read(begin: int) -> None:
        end = min(begin + _PART, len(view))
        while begin < end:
            count = os.preadv(file.fileno(), [view[begin:end]], begin)
            if count == 0:
                raise ValueError("it became shorter while it was read")
            begin += count

    with ThreadPoolExecutor(torch.get_num_threads(), "quire-packed-cache-read") as threads:
        for _ in threads.map(read, range(0, len(view), _PART)):
            pass


class WrittenWeights:
    """Writes packed weights to a new file while a model is loaded."""

    def __init__(self, cache: PackedCache, path: Path) -> None:
        """`path`: of the finished file.

        Raises:
            OSError: nothing can be written there.
        """
        self._cache, self._path = cache, path
        self._unfinished = path.with_name(f"{path.stem}.{os.getpid()}-{time.monotonic_ns()}{_UNFINISHED}")
        self._file: BinaryIO | None = self._unfinished.open("xb")
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process ends
        self._room = cache.room()
        self._entries: dict[str, Any] = {}

    def add(self, parameter: str, weight: SavableWeight) -> None:
        """Write the weight of a parameter. After an error, or without room, nothing more is written."""
        if self._file is None:
            return
        if self._file.tell() + weight.nbytes > self._room:
            logger.info("packed weights are not cached: they have more than %d MiB", self._room >> 20)
            self.abandon()
            return
        saved = weight.saved()
        try:
            places = {name: self._write(tensor) for name, tensor in saved.tensors.items()}
        except OSError as error:
            self._fail(error)
            return
        shape = [weight.size_out, weight.size_in]
        self._entries[parameter] = {"kind": saved.kind, "facts": saved.facts, "shape": shape, "tensors": places}

    def finish(self) -> None:
        """Make the file whole, in a thread: it waits for the disk."""
        if self._file is None:
            return
        if self._entries:
            threading.Thread(target=self._finish, name="quire-packed-cache", daemon=True).start()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Remove the file, if it is not whole."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._unfinished.unlink()
            self._file = None

    def _write(self, tensor: Tensor) -> tuple[str, list[int], int]:
        """Write a tensor; returns its dtype, its shape and where it begins."""
        assert self._file is not None
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        begin = self._file.tell()
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return str(tensor.dtype).removeprefix("torch."), [*tensor.shape], begin

    def _finish(self) -> None:
        assert self._file is not None
        try:
            index = json.dumps(self._entries).encode()
            self._file.write(index + _END.pack(hashlib.sha256(index).digest(), len(index), _MAGIC))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._cache.add(self._unfinished, self._path)
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        logger.warning("packed weights cannot be cached in %s: %s", self._path.parent, error)
        self.abandon()


def _is_abandoned(path: Path, age: float) -> bool:
    """Whether an unfinished file has no writer, as who writes one has its lock. `age`: seconds since the last write.

    Raises:
        OSError: it cannot be read.
    """
    if age <= _LOCKED:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return age > _ABANDONED
    return True


def key_of(files: Iterable[Path], *facts: object) -> str:
    """A name for the packed weights of files as they are now, by this version of the code that reads and packs them.

    Files are known by their size, their time and samples of their content.

    Args:
        files: those of the checkpoint, and others that say how it is read.
        facts: what else decides how weights are packed.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(repr((_code_digest(), native.instructions(), torch.get_default_dtype(), facts)).encode())
    for path in files:
        status = path.stat()
        digest.update(f"\0{status.st_size} {status.st_mtime_ns}\0".encode())
        for sample in samples_of(path):
            digest.update(sample)
    return digest.hexdigest()[:40]


def samples_of(path: Path) -> Iterator[bytes]:
    """Yield samples of a file's content, by which it is known without being read.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE) * index // (_SAMPLES - 1) if size > _SAMPLE else 0)
            yield file.read(_SAMPLE)


def _code_digest() -> bytes:
    """What the version of the kernels is known by: the library, their source, and that of what reads checkpoints."""
    digest = hashlib.sha256()
    if native.kernels is not None:
        library = Path(native.kernels.__file__).stat()
        digest.update(f"{library.st_size} {library.st_mtime_ns}".encode())
    digest.update(source_digest(_CODE, (".py",)))
    return digest.digest()


def source_digest(folders: Iterable[str], suffixes: Container[str] = (".py", ".h", ".cpp")) -> bytes:
    """Return the digest of the source files in folders of Quire."""
    digest, package = hashlib.sha256(), Path(quire.__file__).parent
    files = (path for folder in folders for path in (package / folder).rglob("*") if path.suffix in suffixes)
    for path in sorted(files):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.digest()

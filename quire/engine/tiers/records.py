"""Records: files with the bytes of one block each, whose damage is noticed."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash
from typing_extensions import Buffer

_MAGIC = b"quirekv1"
_HEADER = struct.Struct("<8sQ16s")  # what the file is, length of the content, checksum of key and content
_MODE = 0o600
_PAGE = 4096  # bytes that a file system gives to files at a time


class DamagedRecord(Exception):
    """A file is not what was written."""


def record_bytes(content: int) -> int:
    """Return the bytes of the disk that a record takes; `content`: its bytes."""
    return disk_bytes(_HEADER.size + content)


def file_bytes(content: int) -> int:
    """Return the size of a record's file."""
    return _HEADER.size + content


def disk_bytes(size: int) -> int:
    """Return the bytes of the disk that a file of a size takes."""
    return -(-size // _PAGE) * _PAGE


def write_record(path: Path, key: bytes, content: Buffer) -> None:
    """Write a record to a file that nobody reads. It is not synchronized: what a crash leaves of it is noticed.

    Raises:
        OSError: it cannot be written as a whole.
    """
    view = memoryview(content).cast("B")
    header = _HEADER.pack(_MAGIC, len(view), _checksum(key, view))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE), "wb", buffering=0) as file:
        written = os.writev(file.fileno(), [header, view])
        if written < len(header):
            raise OSError(f"{written} bytes of a header were written")
        written -= len(header)
        while written < len(view):
            written += os.write(file.fileno(), view[written:])


def read_record(path: Path, key: bytes) -> bytes:
    """Return the content of a record.

    It is read, not mapped: a mapped file of a disk that fails ends the process.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DamagedRecord: it is not the one that was written with this key.
    """
    with path.open("rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        if len(header) != _HEADER.size:
            raise DamagedRecord("it ends within its header")
        magic, length, checksum = _HEADER.unpack(header)
        if magic != _MAGIC or os.fstat(file.fileno()).st_size != file_bytes(length):
            raise DamagedRecord("its header does not fit to its size")
        content = file.read(length)
        while len(content) < length and (more := file.read(length - len(content))):
            content += more
        if len(content) < length or _checksum(key, memoryview(content)) != checksum:
            raise DamagedRecord("its checksum is another one")
    return content


def _checksum(key: bytes, content: memoryview) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()

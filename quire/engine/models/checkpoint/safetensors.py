"""Reads safetensors files through a memory map, and releases the pages of a tensor once it has been used.

The safetensors library maps files too, but the pages it has read stay resident until the file is closed. For a single
large file that doubles the peak memory of loading.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from quire.engine.models.errors import BrokenFolder

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PlainName = Callable[[str], str | None]
_LFS_POINTER = b"version https://git-lfs"  # the start of the file that a clone without Git LFS has instead


class SafetensorsFile:
    """One open file. The format: header length (8 bytes, little-endian), JSON header, data.

    Attributes:
        metadata: what the header says of tensors, by the names under which they are known.
    """

    def __init__(self, path: Path, plain_name: PlainName = str) -> None:
        """Open the file and read its header.

        Args:
            path: the file.
            plain_name: gives the name under which a tensor is known; None: it is left out, as if it were not there.

        Raises:
            BrokenFolder: the file is not a complete safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self._map[: len(_LFS_POINTER)] == _LFS_POINTER:
                raise ValueError("it is a Git LFS pointer; run `git lfs pull` where it was cloned")
            (length,) = struct.unpack("<Q", self._map[:8])
            header: dict[str, Any] = json.loads(self._map[8 : 8 + length])
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
        except (OSError, ValueError, RecursionError, struct.error) as error:
            raise BrokenFolder(f"{path.name} is not a safetensors file: {error}") from error
        metadata = header.pop("__metadata__", None)
        self._start = 8 + length
        self._entries = header
        self._check_entries()
        self._check_size()
        self._rename(plain_name)
        self.metadata = _of_tensors(metadata, plain_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Tensors may still be views of the map; it is closed with the last of them.
        del self._map

    def names(self) -> list[str]:
        """Return the names of the tensors in file order."""
        return sorted(self._entries, key=lambda name: int(self._entries[name]["data_offsets"][0]))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return _DTYPES[self._entries[name]["dtype"]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def size(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        begin, end = self._entries[name]["data_offsets"]
        return int(end - begin)

    def tensor(self, name: str) -> Tensor:
        """Return a view of the file's data; copy it to keep it, then call `release`."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=self._start + begin)
        return _aligned(data, dtype).view(entry["shape"])

    def release(self, name: str) -> None:
        """Allow the operating system to drop the pages of a tensor from memory."""
        begin, end = self._entries[name]["data_offsets"]
        first = -(-(self._start + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self._start + end) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _check_entries(self) -> None:
        for name, entry in self._entries.items():
            try:
                dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
            except (TypeError, KeyError, ValueError) as error:
                raise BrokenFolder(f"{self.path.name}: the entry of tensor {name} is malformed") from error
            if not isinstance(dtype, str) or dtype not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise BrokenFolder(f"{self.path.name}: tensor {name} has dtype {dtype}; supported are {known}")
            if not whole or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
                raise BrokenFolder(
                    f"{self.path.name}: tensor {name} of shape {shape} and dtype {dtype} "
                    f"cannot be at bytes {begin} to {end}"
                )

    def _rename(self, plain_name: PlainName) -> None:
        stored, self._entries = self._entries, {}
        for name, entry in stored.items():
            if (plain := plain_name(name)) is None:
                continue
            if plain in self._entries:
                raise BrokenFolder(f"{self.path.name}: {name} is there under another name, too")
            self._entries[plain] = entry

    def _check_size(self) -> None:
        end = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        if self._start + end > len(self._map):
            raise BrokenFolder(
                f"{self.path.name} is truncated: expected {self._start + end} bytes, found {len(self._map)}"
            )


def _of_tensors(metadata: object, plain_name: PlainName) -> dict[str, str]:
    """The metadata under names of tensors, which have dots."""
    entries = metadata.items() if isinstance(metadata, dict) else ()
    texts = {name: text for name, text in entries if "." in name and isinstance(text, str)}
    return {plain: text for name, text in texts.items() if (plain := plain_name(name)) is not None}


def _aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes as `dtype`; unaligned data is copied first."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)

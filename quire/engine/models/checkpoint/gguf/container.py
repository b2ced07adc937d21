"""GgufFile: the metadata and the tensors of one GGUF file.

Without torch: a server reads what its files say before it imports torch. The format: a header, metadata, where each tensor
lies, and the tensors' blocks of bytes.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.errors import BrokenFolder

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST = 1 << 20  # values of metadata, and tensors
_MOST_DIMS = 4
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class BlockKind(NamedTuple):
    """How numbers are stored: `values` of them in `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


BLOCK_KINDS = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    30: BlockKind("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file.

    Attributes:
        kind: of its blocks.
        shape: rows before columns; blocks lie in the last dimension.
        begin, end: its bytes in the file.
    """

    kind: BlockKind
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """One file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            BrokenFolder: the file is no complete GGUF file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read()
        except BrokenFolder:
            raise
        except (OSError, ValueError, OverflowError, struct.error, UnicodeDecodeError) as error:
            raise BrokenFolder(f"{path.name} is not a GGUF file that can be read: {error}") from error

    def _read(self) -> None:
        reader = _Reader(self.map)
        if reader.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = reader.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported are {', '.join(map(str, _VERSIONS))}")
        tensors, values = reader.count(), reader.count()
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = reader.text()
            self.metadata[key] = reader.value(reader.scalar("I"))
        infos = {reader.text(): self._info(reader) for _ in range(tensors)}
        if len(infos) != tensors:
            raise ValueError("two of its tensors have the same name")
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-reader.position // alignment) * alignment
        self.tensors = {
            name: TensorInfo(kind, shape, start + offset, start + offset + _nbytes(kind, shape))
            for name, (kind, shape, offset) in infos.items()
        }
        for name, info in self.tensors.items():
            if info.end > len(self.map):
                raise BrokenFolder(
                    f"{self.path.name} is truncated: {name} ends at byte {info.end}, but it has {len(self.map)} bytes"
                )

    def _info(self, reader: _Reader) -> tuple[BlockKind, tuple[int, ...], int]:
        dims = reader.scalar("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise ValueError(f"a tensor has {dims} dimensions")
        shape = tuple(reader.scalar("Q") for _ in range(dims))[::-1]
        kind, offset = reader.scalar("I"), reader.scalar("Q")
        if kind not in BLOCK_KINDS:
            known = ", ".join(block.name for block in BLOCK_KINDS.values())
            raise ValueError(f"a tensor has blocks of kind {kind}; supported are {known}")
        block = BLOCK_KINDS[kind]
        if shape[-1] % block.values:
            raise ValueError(f"a tensor of shape {shape} cannot have blocks of {block.values} values ({block.name})")
        return block, shape, offset


def _nbytes(kind: BlockKind, shape: Sequence[int]) -> int:
    return math.prod(shape) // kind.values * kind.nbytes


class _Reader:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.position:
            raise ValueError("it is truncated")
        self.position += size
        return self._data[self.position - size : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def count(self) -> int:
        count: int = self.scalar("Q")
        if count > _MOST:
            raise ValueError(f"it says that it has {count} values or tensors")
        return count

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of its metadata is of kind {kind}")
        inner, length = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize(code)))
        if inner != _STRING:
            raise ValueError(f"an array of its metadata has values of kind {inner}")
        return _Texts(self._data, self._borders(length))

    def _borders(self, length: int) -> list[int]:
        """Skip texts; returns where each begins, behind its length, and where the last one ends."""
        data, position, size = self._data, self.position, len(self._data)
        if length > (size - position) // 8:
            raise ValueError("it is truncated")
        borders = []
        for _ in range(length):
            position += 8
            borders.append(position)
            position += int.from_bytes(data[position - 8 : position], "little")
            if position > size:
                raise ValueError("it is truncated")
        self.position = position
        return [*borders, position + 8]


class _Texts(Sequence[str]):
    """Texts of a file, which are decoded when they are needed."""

    def __init__(self, data: mmap.mmap, borders: list[int]) -> None:
        self._data = data
        self._borders = borders

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._data[self._borders[position] : self._borders[position + 1] - 8].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        for begin, end in pairwise(self._borders):
            yield self._data[begin : end - 8].decode(errors="replace")


def open_parts(first: Path) -> list[GgufFile]:
    """A file, and all others if its model is split into several.

    Raises:
        BrokenFolder: one is missing, or does not belong to the others.
    """
    files = [GgufFile(first)]
    count = files[0].metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return files
    match = _SPLIT.search(first.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != 1:
        raise BrokenFolder(
            f"{first.name} is one of {count} files, but its name does not end with -00001-of-{count:05d}.gguf: give the "
            "first file under its own name"
        )
    return files + [GgufFile(path) for path in parts_of(first)[1:]]


def parts_of(first: Path) -> list[Path]:
    """The files of a model by the name of the first one."""
    match = _SPLIT.search(first.name)
    if match is None:
        return [first]
    stem = first.name[: match.start()]
    return [first.with_name(f"{stem}-{i:05d}-of-{match['count']}.gguf") for i in range(1, int(match["count"]) + 1)]


def facts_of(files: Sequence[GgufFile]) -> GgufFacts:
    """What the files of a model say about it."""
    owners = {name: file for file in files for name in file.tensors}
    if len(owners) != sum(len(file.tensors) for file in files):
        raise BrokenFolder(f"{files[0].path.name}: two of its files have the same tensor")

    def values(name: str) -> Sequence[float]:
        file = owners[name]
        info = file.tensors[name]
        if info.kind.name != "F32":
            raise BrokenFolder(f"{file.path.name}: {name} must be F32, not {info.kind.name}")
        return struct.unpack(f"<{(info.end - info.begin) // 4}f", file.map[info.begin : info.end])

    shapes = {name: file.tensors[name].shape for name, file in owners.items()}
    return GgufFacts(files[0].path.name, files[0].metadata, shapes, values)

"""GgufFile: the metadata and the tensors of one GGUF file.

Without torch: a server reads what its files say before it imports torch. The format: a header, metadata, where each
tensor lies, and the tensors' blocks of bytes.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from quire.engine.models.checkpoint.gguf.values import Value, ValueReader
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LFS_POINTER = b"version https://git-lfs"  # the start of the file that a clone without Git LFS has instead
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 17
_SMALLEST_ENTRY, _SMALLEST_PLACE = 14, 33  # bytes
_MOST_DIMS = 4
_MOST_FILES = 4096  # of one model
_ALIGNMENT = 32
_SHOWN = 100  # characters of a name in an error
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
    10: BlockKind("Q2_K", 256, 84),
    11: BlockKind("Q3_K", 256, 110),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    16: BlockKind("IQ2_XXS", 256, 66),
    17: BlockKind("IQ2_XS", 256, 74),
    18: BlockKind("IQ3_XXS", 256, 98),
    19: BlockKind("IQ1_S", 256, 50),
    20: BlockKind("IQ4_NL", 32, 18),
    21: BlockKind("IQ3_S", 256, 110),
    22: BlockKind("IQ2_S", 256, 82),
    23: BlockKind("IQ4_XS", 256, 136),
    24: BlockKind("I8", 1, 1),
    25: BlockKind("I16", 1, 2),
    26: BlockKind("I32", 1, 4),
    27: BlockKind("I64", 1, 8),
    28: BlockKind("F64", 1, 8),
    29: BlockKind("IQ1_M", 256, 56),
    30: BlockKind("BF16", 1, 2),
    34: BlockKind("TQ1_0", 256, 54),
    35: BlockKind("TQ2_0", 256, 66),
    39: BlockKind("MXFP4", 32, 17),
    40: BlockKind("NVFP4", 64, 36),
    41: BlockKind("Q1_0", 128, 18),
    42: BlockKind("Q2_0", 64, 18),
}
# Kinds that are in no files of today: of activations, withdrawn, or packed for one processor.
_OTHER_KINDS = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
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
    """One file, mapped into memory.

    Attributes:
        map: all of its bytes.
        metadata: values by key. Texts of arrays are decoded when they are needed.
        tensors: by name, in the order of the file.
    """

    def __init__(self, path: Path, *, with_tensors: bool = True) -> None:
        """Read all but the tensors. `with_tensors`: the file must have them as well, not only what says where they lie.

        Raises:
            BrokenFolder: the file is no complete GGUF file.
            UnsupportedModel: its version, its byte order or the kind of a tensor is not supported.
        """
        self.path = path
        self._with_tensors = with_tensors
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BrokenFolder(f"{path.name} is not a GGUF file that can be read: {error}") from error
        reader = ValueReader(self.map)
        with self._naming("its header"):
            self._check_version(reader)
            num_tensors = reader.count(_SMALLEST_PLACE, _MOST_TENSORS)
            num_keys = reader.count(_SMALLEST_ENTRY, _MOST_KEYS)
        self.metadata: Mapping[str, Value] = self._metadata(reader, num_keys)
        places = self._places(reader, num_tensors)
        self.tensors: Mapping[str, TensorInfo] = self._tensors(places, reader.position)

    def integer(self, key: str, default: int) -> int:
        """The integer under a key.

        Raises:
            BrokenFolder: it is something else.
        """
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise BrokenFolder(f"{self.path.name}: {key} must be an integer, not {_shown(value)}")
        return value

    def _check_version(self, reader: ValueReader) -> None:
        if self.map[: len(_LFS_POINTER)] == _LFS_POINTER:
            raise ValueError("it is a Git LFS pointer; run `git lfs pull` where it was cloned")
        if reader.bytes(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = reader.uint32()
        if version in _VERSIONS:
            return
        if version and not version & 0xFFFF:
            raise UnsupportedModel(
                f"{self.path.name} is a big-endian GGUF file, which is not supported: `gguf-convert-endian` of the "
                "Python package gguf makes it a little-endian one"
            )
        raise UnsupportedModel(
            f"{self.path.name} is a GGUF file of version {version}; supported are {' and '.join(map(str, _VERSIONS))}"
        )

    def _metadata(self, reader: ValueReader, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        key = None
        for index in range(count):
            with self._naming(f"metadata {index + 1} of {count} (behind {_shown(key)})"):
                key = reader.name()
            with self._naming(_shown(key)):
                if key in metadata:
                    raise ValueError("it is there twice")
                metadata[key] = reader.value()
        return metadata

    def _places(self, reader: ValueReader, count: int) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        name = None
        for index in range(count):
            with self._naming(f"tensor {index + 1} of {count} (behind {_shown(name)})"):
                name = reader.name()
            with self._naming(f"tensor {_shown(name)}"):
                if name in places:
                    raise ValueError("it is there twice")
                places[name] = self._place(reader, name)
        return places

    def _place(self, reader: ValueReader, name: str) -> _Place:
        dims = reader.uint32()
        if not 1 <= dims <= _MOST_DIMS:
            raise ValueError(f"it has {dims} dimensions; tensors have 1 to {_MOST_DIMS}")
        shape = tuple(reader.uint64() for _ in range(dims))[::-1]
        number, offset = reader.uint32(), reader.uint64()
        kind = BLOCK_KINDS.get(number)
        if kind is None:
            known = ", ".join(block.name for block in BLOCK_KINDS.values())
            raise UnsupportedModel(
                f"{self.path.name}: tensor {_shown(name)} is stored as {_OTHER_KINDS.get(number, 'an unknown kind')} "
                f"({number}), which is not supported; supported are {known}"
            )
        if 0 in shape or shape[-1] % kind.values:
            raise ValueError(
                f"its shape is {shape}, which does not fit to blocks of {kind.values} values ({kind.name})"
            )
        return _Place(kind, shape, offset)

    def _tensors(self, places: Mapping[str, _Place], behind: int) -> dict[str, TensorInfo]:
        """Where tensors lie, if that is inside of the file, and nothing overlaps. `behind`: end of what was read."""
        alignment = self.integer("general.alignment", _ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise BrokenFolder(f"{self.path.name}: general.alignment must be a power of two, not {alignment}")
        start = -(-behind // alignment) * alignment
        tensors = {}
        for name, place in sorted(places.items(), key=lambda item: item[1].offset):
            begin = start + place.offset
            info = TensorInfo(place.kind, place.shape, begin, begin + place.nbytes)
            with self._naming(f"tensor {_shown(name)}"):
                if place.offset % alignment:
                    raise ValueError(f"its offset {place.offset} is no multiple of general.alignment {alignment}")
                if self._with_tensors and info.end > len(self.map):
                    raise ValueError(
                        f"the file is truncated: the tensor ends at byte {info.end}, the file at byte {len(self.map)}"
                    )
            tensors[name] = info
        for (first, info), (second, following) in pairwise(tensors.items()):
            if following.begin < info.end:
                raise BrokenFolder(f"{self.path.name}: tensors {_shown(first)} and {_shown(second)} overlap")
        return tensors

    @contextmanager
    def _naming(self, subject: str) -> Iterator[None]:
        """Say in errors what of which file is broken."""
        try:
            yield
        except (ValueError, struct.error, OverflowError) as error:
            raise BrokenFolder(f"{self.path.name}: {subject}: {error}") from error


class _Place(NamedTuple):
    """Where a tensor lies, as the file says it. `offset`: from the first tensor's place."""

    kind: BlockKind
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.values * self.kind.nbytes


def open_parts(first: Path, *, with_tensors: bool = True) -> list[GgufFile]:
    """A file, and all others if its model is split into several. `with_tensors`: see `GgufFile`.

    Raises:
        BrokenFolder: one cannot be read, is missing, or does not belong to the others.
        UnsupportedModel: see `GgufFile`.
    """
    files = [GgufFile(first, with_tensors=with_tensors)]
    paths = parts_of(first)
    count = files[0].integer("split.count", 1) or 1
    if count == 1 == len(paths):
        return files
    if count != len(paths) or first != paths[0]:
        raise BrokenFolder(
            f"{first.name}: split.count says that it is one of {count} files (at most {_MOST_FILES} are supported), "
            f"but its name does not end with -00001-of-{count:05d}.gguf: give the first file under its own name"
        )
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise BrokenFolder(f"{first.name} is one of {count} files, of which {len(missing)} are missing: {missing[0]}")
    files += [GgufFile(path, with_tensors=with_tensors) for path in paths[1:]]
    _check_parts(files)
    return files


def _check_parts(files: list[GgufFile]) -> None:
    """Raise BrokenFolder if files are not those of one model in their order."""
    for index, file in enumerate(files):
        if (count := file.integer("split.count", 0)) != len(files):
            raise BrokenFolder(f"{file.path.name}: split.count is {count}, but there are {len(files)} files")
        if (number := file.integer("split.no", 0)) != index:
            raise BrokenFolder(f"{file.path.name}: split.no is {number}, but by its name the file is number {index}")
    owners: dict[str, GgufFile] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise BrokenFolder(f"{file.path.name}: tensor {_shown(name)} is in {owners[name].path.name}, too")
            owners[name] = file
    if (total := files[0].integer("split.tensors.count", len(owners))) != len(owners):
        raise BrokenFolder(
            f"{files[0].path.name}: split.tensors.count is {total}, but {len(files)} files have {len(owners)} tensors"
        )


def parts_of(first: Path) -> list[Path]:
    """The files of a model by the name of one of them; only that one if its name is not that of a part."""
    match = _SPLIT.search(first.name)
    if match is None or not 1 <= int(match["count"]) <= _MOST_FILES:
        return [first]
    stem = first.name[: match.start()]
    return [first.with_name(f"{stem}-{i:05d}-of-{match['count']}.gguf") for i in range(1, int(match["count"]) + 1)]


def _shown(value: Value | None) -> str:
    """The beginning of a name or value for an error, on one line."""
    if value is None:
        return "the header"
    value = value if isinstance(value, bool | int | float) else value[: _SHOWN + 1]
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

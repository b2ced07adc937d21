"""ValueReader: numbers, texts and arrays at the beginning of a GGUF file, bounded before memory is taken for them."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

from typing_extensions import override

Scalar = bool | int | float | str
Value = Scalar | Sequence[Scalar]
# Bounds, far above what files have: their tokenizers take up to 30 MB and two million values.
_MOST_BYTES = 1 << 28  # of all metadata, and all places of tensors
_MOST_VALUES = 1 << 23  # in all arrays
_LONGEST_NAME = (1 << 16) - 1  # bytes, as the format says
_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]
_LENGTH = _UINT64.size  # bytes before a text


class ValueReader:
    """Reads values that lie one behind the other. Errors are of the kind ValueError, and name no file.

    Attributes:
        position: where the next value begins.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), _MOST_BYTES)
        self._values_left = _MOST_VALUES
        self.position = 0

    def bytes(self, size: int) -> bytes:
        """Some bytes."""
        begin = self._skip(size)
        return self._data[begin : self.position]

    def uint32(self) -> int:
        """A number of 32 bits."""
        return int(self._scalar(_UINT32))

    def uint64(self) -> int:
        """A number of 64 bits."""
        return int(self._scalar(_UINT64))

    def count(self, smallest: int, most: int) -> int:
        """How many entries follow, of at least `smallest` bytes each."""
        count = self.uint64()
        if count > most:
            raise ValueError(f"there are {count}, but at most {most} are supported")
        self._check_size(count * smallest)
        return count

    def name(self) -> str:
        """A name, which is not empty."""
        length = self.uint64()
        if not 1 <= length <= _LONGEST_NAME:
            raise ValueError(f"its name has {length} bytes; names have 1 to {_LONGEST_NAME}")
        return self.bytes(length).decode()

    def value(self) -> Value:
        """A kind, and a value of it."""
        kind = self.uint32()
        if kind == _STRING:
            return self.bytes(self.uint64()).decode(errors="replace")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _ARRAY:
            return self._array()
        raise ValueError(f"it is of kind {kind}, which does not exist")

    def _array(self) -> Sequence[Scalar]:
        kind, length = self.uint32(), self.uint64()
        if length > self._values_left:
            raise ValueError(f"it has {length} values, but at most {_MOST_VALUES} in all arrays are supported")
        self._values_left -= length
        if kind == _STRING:
            return self._texts(length)
        if kind in _SCALARS:
            layout = struct.Struct(f"<{length}{_SCALARS[kind].format[1:]}")
            values: tuple[Scalar, ...] = layout.unpack_from(self._data, self._skip(layout.size))
            return values
        if kind == _ARRAY:
            raise ValueError("it is an array of arrays, which is not supported")
        raise ValueError(f"it is an array of values of kind {kind}, which does not exist")

    def _texts(self, length: int) -> _Texts:
        """Skip texts."""
        self._check_size(length * _LENGTH)
        data, end, position = self._data, self._end - _LENGTH, self.position
        read = _UINT64.unpack_from
        begins = array("Q", bytes(length * _LENGTH))
        for index in range(length):
            if position > end:
                self._check_size(position + _LENGTH - self.position)
            begins[index] = position + _LENGTH
            position += _LENGTH + read(data, position)[0]
        self._skip(position - self.position)
        begins.append(position + _LENGTH)
        return _Texts(data, begins)

    def _scalar(self, layout: struct.Struct) -> Scalar:
        value: Scalar = layout.unpack_from(self._data, self._skip(layout.size))[0]
        return value

    def _skip(self, size: int) -> int:
        """Go on behind some bytes; returns where they begin."""
        self._check_size(size)
        begin, self.position = self.position, self.position + size
        return begin

    def _check_size(self, size: int) -> None:
        if size > self._end - self.position:
            raise ValueError(
                f"it needs {size} bytes at byte {self.position}, but "
                + (
                    f"the file ends at byte {self._end}"
                    if self._end == len(self._data)
                    else f"metadata of at most {_MOST_BYTES} bytes is supported"
                )
            )


class _Texts(Sequence[str]):
    """Texts of a file, which are decoded when they are needed."""

    def __init__(self, data: mmap.mmap, begins: array[int]) -> None:
        """`begins`: where each text begins, and where one behind the last one would begin."""
        self._data = data
        self._begins = begins

    @override
    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._text(*self._begins[position : position + 2])

    @override
    def __iter__(self) -> Iterator[str]:
        data = self._data
        for begin, following in pairwise(self._begins):  # many: vocabularies have hundreds of thousands
            yield data[begin : following - _LENGTH].decode("utf-8", "replace")

    @override
    def __repr__(self) -> str:
        return repr(self[:3])[:-1] + (", ...]" if len(self) > 3 else "]")

    def _text(self, begin: int, following: int) -> str:
        return self._data[begin : following - _LENGTH].decode(errors="replace")

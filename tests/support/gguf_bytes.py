"""GGUF files written byte by byte, so that every number in them can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
F32, Q8_0, Q4_K = 0, 8, 12


@dataclass
class Entry:
    """A value of metadata. `value`: its bytes behind the kind."""

    key: bytes
    kind: int
    value: bytes
    key_length: int | None = None  # None: what it is

    def encoded(self) -> bytes:
        length = len(self.key) if self.key_length is None else self.key_length
        return struct.pack("<Q", length) + self.key + struct.pack("<I", self.kind) + self.value


@dataclass
class Place:
    """A tensor and its bytes. Numbers that are None are what they should be."""

    name: bytes
    shape: tuple[int, ...] = (4, 8)  # rows before columns
    kind: int = F32
    data: bytes = bytes(4 * 8 * 4)
    offset: int | None = None
    num_dims: int | None = None
    name_length: int | None = None

    def encoded(self, offset: int) -> bytes:
        name = struct.pack("<Q", len(self.name) if self.name_length is None else self.name_length) + self.name
        dims = len(self.shape) if self.num_dims is None else self.num_dims
        sizes = struct.pack(f"<I{len(self.shape)}Q", dims, *self.shape[::-1])
        return name + sizes + struct.pack("<IQ", self.kind, offset if self.offset is None else self.offset)


@dataclass
class Container:
    """A file."""

    entries: list[Entry] = field(default_factory=lambda: [text("general.architecture", "llama")])
    places: list[Place] = field(default_factory=lambda: [Place(b"token_embd.weight"), Place(b"output_norm.weight")])
    magic: bytes = b"GGUF"
    version: int = 3
    num_entries: int | None = None
    num_places: int | None = None
    alignment: int = 32

    def encoded(self) -> bytes:
        entries = len(self.entries) if self.num_entries is None else self.num_entries
        places = len(self.places) if self.num_places is None else self.num_places
        head = self.magic + struct.pack("<IQQ", self.version, places, entries)
        head += b"".join(entry.encoded() for entry in self.entries)
        data = b""
        for place in self.places:
            head += place.encoded(len(data))
            data += padded(place.data, self.alignment)
        return padded(head, self.alignment) + data


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def text(key: str, value: str) -> Entry:
    return Entry(key.encode(), STRING, struct.pack("<Q", len(value.encode())) + value.encode())


def number(key: str, value: int) -> Entry:
    return Entry(key.encode(), UINT32, struct.pack("<I", value))


def texts(key: str, values: Sequence[str]) -> Entry:
    items = b"".join(struct.pack("<Q", len(value.encode())) + value.encode() for value in values)
    return Entry(key.encode(), ARRAY, struct.pack("<IQ", STRING, len(values)) + items)


def numbers(key: str, values: Sequence[int]) -> Entry:
    return Entry(key.encode(), ARRAY, struct.pack(f"<IQ{len(values)}I", UINT32, len(values), *values))

"""Hundreds of GGUF files that are broken in one place each, and what errors about them must name."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.gguf_bytes import (
    ARRAY,
    FLOAT32,
    Q4_K,
    Q8_0,
    STRING,
    UINT32,
    Container,
    Entry,
    Place,
    number,
    numbers,
    text,
    texts,
)

HUGE = (1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
NAME = "model.gguf"


@dataclass(frozen=True)
class Broken:
    """Files of a folder. `subject`: what the error names besides a file; the first of `files` is opened."""

    label: str
    files: dict[str, bytes]
    subject: str

    def written(self, folder: Path) -> Path:
        for path in folder.iterdir():
            path.unlink()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / next(iter(self.files))


def whole() -> Container:
    """A file with metadata of many kinds, and three tensors."""
    entries = [
        text("general.architecture", "llama"),
        number("llama.block_count", 2),
        texts("tokenizer.ggml.tokens", ["a", "bc", "\N{SNOWMAN}"]),
        numbers("tokenizer.ggml.token_type", [1, 1, 3]),
        Entry(b"llama.rope.freq_base", FLOAT32, struct.pack("<f", 1e4)),
        Entry(b"tokenizer.ggml.add_bos_token", 7, b"\1"),
        Entry(b"some.small", 1, b"\xff"),
        Entry(b"some.large", 10, struct.pack("<Q", 1 << 40)),
    ]
    places = [
        Place(b"token_embd.weight"),
        Place(b"blk.0.attn_q.weight", (2, 64), Q8_0, bytes(4 * 34)),
        Place(b"blk.0.ffn_down.weight", (1, 256), Q4_K, bytes(144)),
    ]
    return Container(entries, places)


def broken(kind: str) -> list[Broken]:
    """The files that are broken in one kind of ways."""
    return list(KINDS[kind]())


def _one(label: str, container: Container, subject: str) -> Broken:
    return Broken(label, {NAME: container.encoded()}, subject)


def _truncated() -> Iterator[Broken]:
    data = whole().encoded()
    end = len(data)
    keys = "|".join(entry.key.decode() for entry in whole().entries)
    anywhere = rf": (its header|metadata \d of 8 .*|{keys}|tensor \d of 3 .*|tensor (token_embd|blk)\S+): "
    for size in range(0, 700, 7):
        yield Broken(f"{size} bytes", {NAME: data[:size]}, anywhere if size else "empty file")
    for size in range(end - 144 - 16, end - 16, 12):
        yield Broken(f"{size} bytes", {NAME: data[:size]}, "tensor (token_embd|blk.0.ffn_down).weight: .* truncated")


def _counts() -> Iterator[Broken]:
    for count in HUGE:
        yield _one(f"{count} keys", replace(whole(), num_entries=count), "its header")
        yield _one(f"{count} tensors", replace(whole(), num_places=count), "its header")
    yield _one("a key too many", replace(whole(), num_entries=9), "metadata 9|token_embd.weight|tensor 1 of 3")
    yield _one("a tensor too many", replace(whole(), num_places=4), "tensor 4 of 4")


def _lengths() -> Iterator[Broken]:
    for length in (0, 1 << 16, *HUGE):
        container = whole()
        container.entries[1].key_length = length
        yield _one(f"key of {length} bytes", container, "metadata 2 of 8 .*general.architecture")
        container = whole()
        container.places[1].name_length = length
        yield _one(f"name of {length} bytes", container, "tensor 2 of 3 .*token_embd.weight")
    for length in HUGE:
        for key, value in (
            ("a.text", struct.pack("<Q", length) + b"ab"),
            ("a.list", struct.pack("<IQQ", STRING, 2, length) + b"ab"),
            ("a.list", struct.pack("<IQQ", STRING, 2, 1) + b"a" + struct.pack("<Q", length)),
            ("a.list", struct.pack("<IQ", STRING, length) + b"ab"),
            ("a.list", struct.pack("<IQ", UINT32, length) + b"ab"),
            ("a.list", struct.pack("<IQ", 0, length) + b"ab"),
        ):
            kind = STRING if key == "a.text" else ARRAY
            yield _one(f"{key} of {length}", _with(Entry(key.encode(), kind, value)), key)


def _with(*entries: Entry) -> Container:
    container = whole()
    container.entries += entries
    return container


def _values() -> Iterator[Broken]:
    for kind in (13, 14, 255, 256, (1 << 32) - 1):
        yield _one(f"kind {kind}", _with(Entry(b"a.value", kind, bytes(8))), "a.value")
        yield _one(f"array of kind {kind}", _with(Entry(b"a.list", ARRAY, struct.pack("<IQ", kind, 1))), "a.list")
    nested = struct.pack("<IQ", UINT32, 1) + bytes(4)
    for depth in (1, 2, 50, 5000):
        nested_arrays = struct.pack("<IQ", ARRAY, 1) * depth + nested
        yield _one(f"{depth} nested", _with(Entry(b"a.list", ARRAY, nested_arrays)), "a.list")
    yield _one("a key twice", _with(number("llama.block_count", 2)), "llama.block_count: it is there twice")
    for key in (b"\xff\xfe", b"a\xc3"):
        yield _one(f"key {key!r}", _with(Entry(key, UINT32, bytes(4))), "metadata 9 of 9")


def _alignments() -> Iterator[Broken]:
    for alignment in (0, 3, 24, 33, 31, (1 << 31) + 1, (1 << 32) - 1):
        yield _one(f"alignment {alignment}", _with(number("general.alignment", alignment)), "general.alignment")
    for entry in (
        text("general.alignment", "32"),
        texts("general.alignment", ["32"]),
        numbers("general.alignment", [32] * 1000),
        Entry(b"general.alignment", FLOAT32, struct.pack("<f", 32)),
        Entry(b"general.alignment", 7, b"\1"),
        Entry(b"general.alignment", 11, struct.pack("<q", -32)),
        Entry(b"general.alignment", 11, struct.pack("<q", -(1 << 63))),
    ):
        yield _one(f"alignment {entry.value[:20]!r}", _with(entry), "general.alignment")
    for shift in (12, 20, 31):
        yield _one(f"alignment 1 << {shift}", _with(number("general.alignment", 1 << shift)), "token_embd.weight")


def _shapes() -> Iterator[Broken]:
    def changed(index: int, **fields: Any) -> Container:
        container = whole()
        container.places[index] = replace(container.places[index], **fields)
        return container

    names = "token_embd", "attn_q", "ffn_down"
    for index, dims in product(range(3), (0, 5, 6, 255, (1 << 32) - 1)):
        yield _one(f"{index}: {dims} dimensions", changed(index, num_dims=dims), names[index])
    for index, size in product(range(3), (0, 1 << 20, *HUGE)):
        columns = whole().places[index].shape[1]
        for shape in ((size, columns), (size, size, size, columns), (1, size // columns * columns)):
            yield _one(f"{index}: shape {shape}", changed(index, shape=shape), names[index])
    for columns in (1, 31, 33, 255, 257):
        yield _one(f"Q4_K of {columns}", changed(2, shape=(1, columns)), "ffn_down")
    for kind in (4, 5, 9, 15, 31, 32, 33, 36, 37, 38, 43, 100, (1 << 31), (1 << 32) - 1):
        yield _one(f"kind {kind}", changed(1, kind=kind), "attn_q.*not supported")
    for kind in (27, 28):
        yield _one(f"last tensor of kind {kind}", changed(2, kind=kind), "ffn_down")


def _offsets() -> Iterator[Broken]:
    names = "token_embd", "attn_q", "ffn_down"
    for index, offset in product(range(3), (1, 8, 31, 33, 4096, 1 << 20, *HUGE, (1 << 64) - 32)):
        container = whole()
        container.places[index].offset = offset
        yield _one(f"{index}: offset {offset}", container, names[index])
    for first, second in ((1, 0), (2, 0), (0, 160), (2, 128)):
        container = whole()
        container.places[first].offset = second
        yield _one(f"{first} lies at {second}", container, "overlap")


def _names() -> Iterator[Broken]:
    for first, second in ((0, 1), (0, 2), (1, 2)):
        container = whole()
        container.places[second].name = container.places[first].name
        yield _one(f"{second} is called as {first}", container, "it is there twice")
    for name in (b"", b"\xff", b"a\xe2\x98"):
        container = whole()
        container.places[1].name = name
        yield _one(f"name {name!r}", container, "tensor 2 of 3")


def _headers() -> Iterator[Broken]:
    for magic in (b"GGML", b"ggjt", b"FUGG", b"PK\3\4", b"\0\0\0\0", b"gguf"):
        yield _one(f"magic {magic!r}", replace(whole(), magic=magic), "its header")
    for version in (0, 1, 4, 255, (1 << 32) - 1):
        yield _one(f"version {version}", replace(whole(), version=version), f"version {version}")
    for version in (2, 3):
        yield _one(f"big-endian {version}", replace(whole(), version=version << 24), "big-endian")
    yield Broken("a pointer", {NAME: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "git lfs pull")
    yield Broken("nothing", {NAME: b""}, "")
    yield Broken("another name", {"x-00001-of-00000.gguf": b"GGUF"}, "")


def split(index: int, places: list[Place], **values: int) -> bytes:
    """One of the three files of a split model. `values`: those that differ from what they should be."""
    entries = [text("general.architecture", "llama")] if index == 0 else []
    for name, value in {"no": index, "count": 3, "tensors_count": 3, **values}.items():
        entries.append(number(f"split.{name.replace('_', '.')}", value))
    return Container(entries, places).encoded()


def parts(**values: int) -> dict[str, bytes]:
    """A model in three files. `values`: of the second one."""
    places = whole().places
    return {
        f"m-{index + 1:05d}-of-00003.gguf": split(index, [place], **(values if index == 1 else {}))
        for index, place in enumerate(places)
    }


def _splits() -> Iterator[Broken]:
    first, second, third = parts()
    for missing in (second, third):
        yield Broken(f"without {missing}", {k: v for k, v in parts().items() if k != missing}, missing)
    for number_of in (0, 2, 3, 1 << 31):
        yield Broken(f"second is number {number_of}", parts(no=number_of), f"{second}: split.no is {number_of}")
    for count in (0, 1, 2, 4, 1 << 16):
        yield Broken(f"second is of {count}", parts(count=count), f"{second}: split.count is {count}")
    files = parts()
    for one, other in ((first, second), (second, third), (first, third)):
        yield Broken(f"{other} is {one}", {**files, other: files[one]}, f"{other}: split.no")
        yield Broken(f"{one} is {other}", {**files, one: files[other]}, f"{one}: split.no")
    places = whole().places
    for index in (0, 2):
        yield Broken(f"tensor {index} twice", {**files, second: split(1, [places[index]])}, places[index].name.decode())
    for total in (0, 2, 4, (1 << 32) - 1):
        changed = {**files, first: split(0, places[:1], tensors_count=total)}
        yield Broken(f"{total} tensors", changed, f"{first}: split.tensors.count is {total}")
    yield Broken("no tensors in the last", {**files, third: split(2, [])}, "split.tensors.count is 3")
    for name in ("renamed.gguf", "m-00002-of-00003.gguf", "m-00001-of-00002.gguf", "m-00001-of-99999.gguf"):
        yield Broken(f"first is called {name}", {name: files[first]}, "split.count")
    yield Broken("a name of several", {"m-00001-of-00002.gguf": whole().encoded()}, "split.count")
    for place in (0, 30, 100):
        yield Broken(f"second of {place} bytes", {**files, second: files[second][:place]}, second)


KINDS: dict[str, Callable[[], Iterator[Broken]]] = {
    function.__name__[1:]: function
    for function in (
        _truncated,
        _counts,
        _lengths,
        _values,
        _alignments,
        _shapes,
        _offsets,
        _names,
        _headers,
        _splits,
    )
}

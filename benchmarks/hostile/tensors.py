"""Embeddings of pictures in chats that are no tensors, or tensors that do not fit."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.hostile.media import Medium, Part

WIDTH = 64  # numbers of an embedding of the model that reads them
_GRID = [1, 4, 4]  # of four embeddings
_GOOD_SHAPE = (4, WIDTH)


def tensors() -> list[Medium]:
    """All of them."""
    kinds = (_values, _shapes, _safetensors, _pickles, _archives, _grids, _fields)
    return [medium for kind in kinds for medium in kind()]


def _values() -> Iterator[Medium]:
    for name, value in {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf, "1e38": 1e38}.items():
        values = np.zeros(_GOOD_SHAPE, np.float32)
        values[-1, -1] = value
        yield _embeddings("numbers", name, partial(_file, values))
    yield _embeddings("numbers", "float64 beyond float32", partial(_file, np.full(_GOOD_SHAPE, 1e300)))
    for kind in ("int64", "int32", "bool", "complex64", "uint8"):
        yield _embeddings("numbers", kind, partial(_file, np.zeros(_GOOD_SHAPE, kind)))


def _shapes() -> Iterator[Medium]:
    shapes = [
        *((), (WIDTH,), (0, WIDTH), (4, 0), (4, WIDTH - 1), (4, WIDTH + 1), (2, 4, WIDTH), (1, 1, 4, WIDTH)),
        *((1, WIDTH), (3, WIDTH), (5, WIDTH), (90_000, WIDTH), (1, 90_000 * WIDTH), (90_000 * WIDTH, 1)),
    ]
    for shape in shapes:
        yield _embeddings("shape", f"{shape}", partial(_zeros, shape))
    claims: dict[str, Any] = {
        **{f"{size} x {WIDTH}": [size, WIDTH] for size in (5, 1 << 20, 1 << 40, 1 << 62)},
        "of a size of 300 digits": [10**300, WIDTH],
        "negative": [-4, -WIDTH],
        "all": [-1, WIDTH],
        "of nothing": [0, 1 << 62],
        "of 20,000 axes": [1] * 20_000,
        "of 20,000 axes of 9": [9] * 20_000,
        "of texts": ["4", "64"],
        "of fractions": [4.0, 64.0],
        "of lists": [[4], [64]],
        "null": None,
        "a number": 256,
    }
    for name, shape in claims.items():
        yield _embeddings("shape", f"said to be {name}", partial(_said, shape=shape))


def _safetensors() -> Iterator[Medium]:
    kinds: list[Any] = ["F8_E4M3", "STR", "", 5, None, []]
    said: dict[str, dict[str, Any]] = {
        **{f"offsets {offsets}": {"data_offsets": offsets} for offsets in ([0, 1 << 62], [-8, -1], [9, 3], [], "ab")},
        **{f"type {kind}": {"dtype": kind} for kind in kinds},
    }
    for name, fields in said.items():
        yield _embeddings("safetensors", name, partial(_said, **fields))
    headers = {
        "nothing": b"",
        "no JSON": b"{]",
        "a list": b"[]",
        "lists in lists": b"[" * 60_000,
        "objects in objects": b'{"a":' * 10_000,
        "a long number": b'{"a":' + b"9" * 60_000 + b"}",
        "no tensor": b"{}",
        "two tensors": json.dumps({name: _entry() for name in "ab"}).encode(),
        "6,000 tensors": json.dumps({str(number): {} for number in range(6_000)}).encode(),
        "not UTF-8": b'{"\xff": 1}',
    }
    for name, header in headers.items():
        yield _embeddings("safetensors", f"header of {name}", partial(_with_header, header))
    for length in (1 << 16, 1 << 24, 1 << 62, (1 << 64) - 1):
        make = partial(bytes.__add__, struct.pack("<Q", length), bytes(1 << 20))
        yield _embeddings("safetensors", f"header of {length} bytes", make)
    yield _embeddings("safetensors", "nothing", lambda: b"\0")
    yield _embeddings("safetensors", "noise", partial(random.Random(2).randbytes, 1 << 20))


class _Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _pickles() -> Iterator[Medium]:
    calls = {
        "eval": _Calls(eval, "1 + 1"),
        "open": _Calls(open, "/etc/passwd"),
        "bytearray": _Calls(bytearray, 1 << 33),
        "range": _Calls(range, 1 << 33),
        "getattr": _Calls(getattr, "a", "upper"),
    }
    for name, call in calls.items():
        yield _embeddings("pickle", f"calls {name}", partial(_archive, pickle.dumps(call, 2)))
    system = b"cos\nsystem\n(S'touch /tmp/hostile-media'\ntR."
    twice = pickle.MARK + b"l" + b"".join(pickle.BINPUT + b"\0" + b"0(h\0h\0l" for _ in range(4_000)) + pickle.STOP
    contents = {
        "calls system": system,
        "names of modules": b"cnumpy\nload\n.",
        "lists in lists": pickle.EMPTY_LIST * 30_000 + pickle.APPEND * 29_999 + pickle.STOP,
        "a list of itself": b"]q\0h\0a.",
        "twice as much": twice,
        "a place far away": b"]r\xff\xff\xff\x7f.",
        "a place of 60 million": b"]r\0\0\x94\x03.",
        "a long text": b"X\xff\xff\xff\x7fabc.",
        "a long number": b"\x8b\xff\xff\xff\x7fabc.",
        "marks": b"(" * 60_000 + b".",
        "nothing": b"",
        "noise": random.Random(3).randbytes(60_000),
        "more than 64 KiB": pickle.dumps(list(range(100_000)), 2),
        "a number": pickle.dumps(5, 2),
        "an extension": b"\x82\1.",
        "a persistent id": b"Pa\n.",
    }
    for name, content in contents.items():
        yield _embeddings("pickle", name, partial(_archive, content))
        if name in ("calls system", "nothing", "noise"):
            yield _embeddings("pickle", f"{name}, not in an archive", partial(bytes.ljust, content, 1, b"\0"))
    tensors_said: dict[str, tuple[Any, ...]] = {
        "of 15,000 axes": ((2,) * 15_000, (1,) * 15_000),
        "of other strides": (_GOOD_SHAPE, (1, 4)),
        "of strides of nothing": ((1 << 40, WIDTH), (0, 1)),
        "of negative sizes": ((-1, WIDTH), (WIDTH, 1)),
        "of long sizes": ((1 << 62, 1 << 62), (1 << 62, 1)),
        "of texts": (("4", "64"), ("64", "1")),
        "of nothing": (None, None),
    }
    for name, (shape, stride) in tensors_said.items():
        yield _embeddings("pickle", f"a tensor {name}", partial(_archive, _tensor_pickle(shape, stride)))
    for offset in (-1, 1 << 62, "a", None, 1.5):
        content = _tensor_pickle(_GOOD_SHAPE, (WIDTH, 1), offset)
        yield _embeddings("pickle", f"a tensor at {offset}", partial(_archive, content))
    for key in ("../data.pkl", "1", "/etc/passwd", "", 0, None):
        content = _tensor_pickle(_GOOD_SHAPE, (WIDTH, 1), 0, key)
        yield _embeddings("pickle", f"a tensor in {key!r}", partial(_archive, content), may_be_read=key == 0)


def _archives() -> Iterator[Medium]:
    good = _tensor_pickle(_GOOD_SHAPE, (WIDTH, 1))
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        make = partial(_archive, good, compression=compression, data=bytes(300 << 20))
        yield _embeddings("archive", f"of 300 MB, compressed, {compression}", make)
    for count in (20, 20_000):
        yield _embeddings("archive", f"of {count} files", partial(_archive, good, more=count))
    yield _embeddings("archive", "cut", lambda: _archive(good)[:-60])
    yield _embeddings("archive", "start alone", lambda: b"PK\3\4" + bytes(1 << 20))
    yield _embeddings("archive", "of two pickles", partial(_archive, good, names=("a/data.pkl", "b/data.pkl")))
    yield _embeddings("archive", "without a pickle", partial(_archive, good, names=("a/x",)))
    yield _embeddings("archive", "of big endian", partial(_archive, good, order=b"big"))
    yield _embeddings("archive", "with a password", lambda: _encrypted(_archive(good)))


def _grids() -> Iterator[Medium]:
    grids: list[Any] = [
        *(None, [], [1], [1, 4], [1, 4, 4, 4], [0, 4, 4], [2, 4, 4], [1, -4, -4], [1, 4, 3], [1, 1 << 62, 1 << 62]),
        *([1, 10**200, 10**200], [1.0, 4.0, 4.0], ["1", "4", "4"], [True, 4, 4], [[1, 4, 4], [1, 4, 4]], {}, 5, "AAAA"),
        *("A" * 70_000, [4] * 100_000, [[[1, 4, 4]]], base64.b64encode(_archive(b"cos\nsystem\n.")).decode()),
    ]
    for number, grid in enumerate(grids):
        yield Medium("grid", f"{number}", partial(_part_of, partial(_zeros, _GOOD_SHAPE), grid))


def _fields() -> Iterator[Medium]:
    values: list[Any] = [None, 5, "", "%%%%", "é", [], {}, {"image_embeds": 5}, {"image_embeds": "A"}, {"a": "AAAA"}]
    values += ["A" * (40 << 20), "http://127.0.0.1/", "file:///etc/passwd", "data:,abc"]
    for number, value in enumerate(values):
        part = {"type": "image_embeds", "image_embeds": value}
        yield Medium("embeds field", f"{number}", partial(list, [part]))
    for count in (65, 1_000, 10_000):
        yield Medium("many", f"{count} embeddings", partial(_many, count))


def _embeddings(kind: str, name: str, make: Callable[[], bytes], *, may_be_read: bool = False) -> Medium:
    return Medium(kind, name, partial(_part_of, make, _GRID), may_be_read)


def _part_of(make: Callable[[], bytes], grid: Any) -> list[Part]:
    embeddings = {"image_embeds": base64.b64encode(make()).decode(), "image_grid_thw": grid}
    return [{"type": "image_embeds", "image_embeds": embeddings}]


def _many(count: int) -> list[Part]:
    return _part_of(partial(_zeros, _GOOD_SHAPE), _GRID) * count


def _entry(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(_GOOD_SHAPE), "data_offsets": [0, 4 * WIDTH * 4], **fields}


def _with_header(header: bytes, content: bytes = bytes(4 * WIDTH * 4)) -> bytes:
    return struct.pack("<Q", len(header)) + header + content


def _said(**fields: Any) -> bytes:
    """A file of safetensors that says something else of its tensor."""
    return _with_header(json.dumps({"a": _entry(**fields)}).encode())


_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL", "uint8": "U8"}


def _file(values: np.ndarray[Any, Any]) -> bytes:
    """The file of a tensor."""
    entry = _entry(
        dtype=_NAMES.get(str(values.dtype), "C64"), shape=list(values.shape), data_offsets=[0, values.nbytes]
    )
    return _with_header(json.dumps({"a": entry}).encode(), values.tobytes())


def _zeros(shape: tuple[int, ...]) -> bytes:
    return _file(np.zeros(shape, np.float32))


def _pickled(value: Any) -> bytes:
    """What pushes a value on the stack of an unpickler."""
    return pickle.dumps(value, 2)[2:-1]


def _tensor_pickle(shape: Any, stride: Any, offset: Any = 0, key: Any = "0") -> bytes:
    """The pickle of a tensor as torch writes it."""
    named = (
        b"(" + _pickled("storage") + b"ctorch\nFloatStorage\n" + _pickled(key) + _pickled("cpu") + _pickled(4 * WIDTH)
    )
    fields = _pickled(offset) + _pickled(shape) + _pickled(stride) + _pickled(False)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + named + b"tQ" + fields + b"ccollections\nOrderedDict\n)RtR."


def _archive(
    head: bytes,
    *,
    data: bytes = bytes(4 * WIDTH * 4),
    names: tuple[str, ...] = ("a/data.pkl",),
    more: int = 0,
    order: bytes = b"little",
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """A file as torch writes it. `head`: its pickle; `more`: number of further members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        members = [*((name, head) for name in names), ("a/byteorder", order), ("a/data/0", data)]
        for name, content in [*members, *((f"a/{number}", b"") for number in range(more))]:
            archive.writestr(name, content)
    return file.getvalue()


def _encrypted(content: bytes) -> bytes:
    """An archive that says that its first member has a password."""
    changed = bytearray(content)
    for start, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # its header, and the list at the end
        changed[changed.index(start) + place] |= 1
    return bytes(changed)

"""Data types, byte orders and base64 of arrays."""

from __future__ import annotations

import base64
import json
from typing import get_args

import numpy as np
import pytest
import torch

from quire.api.pooling import arrays
from quire.api.pooling.arrays import byte_size, cast, round_values, shape_of
from quire.protocol.pooling.requests import EmbedDtype, Endianness

RANDOM = np.random.default_rng(0)
VALUES = np.concatenate(
    [
        RANDOM.normal(size=4000) * np.exp(RANDOM.normal(size=4000) * 4),
        [0.0, -0.0, 448, 449, 2**-9, 2**-10, 3 * 2**-10, 5 * 2**-10, 2**-16, 2**-17, 3 * 2**-17, 57344, 1e-30, -1.5],
    ]
).astype(np.float32)


def raw(values: arrays.Floats, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    return b"".join(arrays.to_bytes(values, dtype, endianness))


def json_of(values: arrays.Floats, dtype: EmbedDtype) -> bytes:
    return b"".join(arrays.json_of(values, dtype))


def base64_of(values: arrays.Floats, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    return b"".join(arrays.base64_of(values, dtype, endianness))


@pytest.mark.parametrize(
    ("name", "kind", "largest"),
    [
        ("bfloat16", torch.bfloat16, 1e38),
        ("float16", torch.float16, 65504),
        ("fp8_e4m3", torch.float8_e4m3fn, 448),
        ("fp8_e5m2", torch.float8_e5m2, 57344),
    ],
)
def test_floats_are_rounded_as_torch_does(name: str, kind: torch.dtype, largest: float) -> None:
    values = VALUES[np.abs(VALUES) <= largest]
    expected = torch.from_numpy(values).to(kind)
    assert raw(values, name, "native") == expected.view(torch.uint8).numpy().tobytes()  # type: ignore[arg-type]
    assert np.array_equal(round_values(values, name), expected.float().numpy())  # type: ignore[arg-type]


def test_values_beyond_float8_become_its_largest() -> None:
    numbers = np.array([1e6, -1e6, np.nan], np.float32)
    assert round_values(numbers, "fp8_e4m3")[:2].tolist() == [448, -448]
    assert round_values(numbers, "fp8_e5m2")[:2].tolist() == [57344, -57344]
    assert np.isnan(round_values(numbers, "fp8_e4m3")[2])
    assert np.isnan(round_values(numbers, "bfloat16")[2])


def test_integers_keep_the_directions_of_vectors() -> None:
    vectors = RANDOM.normal(size=(50, 384)).astype(np.float32) * 0.05
    for name, middle in (("int8", 0), ("uint8", 128)):
        numbers = round_values(vectors, name).astype(np.float64) - middle  # type: ignore[arg-type]
        assert np.abs(numbers).max() == 127
        cosines = (numbers * vectors).sum(1) / np.linalg.norm(numbers, axis=1) / np.linalg.norm(vectors, axis=1)
        assert cosines.min() > 0.999
    assert not cast(np.zeros((2, 3), np.float32), "int8").any()


def test_bits_are_signs() -> None:
    vector = np.array([1, -1, 0, 2, -3, 4, 5, -6, 7, -8], np.float32)
    assert cast(vector, "ubinary").tolist() == [0b10010110, 0b10000000]
    assert cast(vector, "binary").tolist() == [0b10010110 - 128, 0]
    assert list(shape_of(vector, "binary")) == [2]
    assert list(shape_of(vector[None].repeat(3, 0), "float16")) == [3, 10]


def test_bytes_have_the_order_that_was_asked_for() -> None:
    vector = np.array([1.5, -2], np.float32)
    assert raw(vector, "float32", "big") == vector.astype(">f4").tobytes()
    assert raw(vector, "float16", "little") == vector.astype("<f2").tobytes()
    assert raw(vector, "bfloat16", "big")[:2] == b"\x3f\xc0"
    assert base64.b64decode(json.loads(base64_of(vector, "float32", "native"))) == vector.tobytes()


def test_numbers_that_json_lacks_are_null() -> None:
    assert json_of(np.array([1, np.nan, np.inf], np.float32), "float32") == b"[1.0,null,null]"
    assert json_of(np.array([[1, np.nan]], np.float32), "int8") == b"[[127,0]]"
    strided = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert json.loads(json_of(strided, "float32")) == strided.tolist()


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_vectors_of_many_tokens_are_written_in_short_pieces(monkeypatch: pytest.MonkeyPatch, dtype: EmbedDtype) -> None:
    converted: list[int] = []

    def counted(values: arrays.Floats, dtype: EmbedDtype) -> arrays.Array:
        converted.append(values.size)
        return cast(values, dtype)

    monkeypatch.setattr(arrays, "cast", counted)
    tokens = RANDOM.normal(size=(700, 100)).astype(np.float32)
    as_bytes, as_text, as_base64 = raw(tokens, dtype, "big"), json_of(tokens, dtype), base64_of(tokens, dtype, "big")
    assert max(converted) <= 1 << 14
    assert np.array_equal(np.array(json.loads(as_text), np.float32), round_values(tokens, dtype).astype(np.float32))
    whole = cast(tokens, dtype)
    assert as_bytes == (whole.byteswap() if whole.itemsize > 1 else whole).tobytes()
    assert base64.b64decode(json.loads(as_base64)) == as_bytes
    assert byte_size(tokens, dtype) == len(as_bytes)
    assert byte_size(tokens[0], dtype) == len(raw(tokens[0], dtype, "native"))

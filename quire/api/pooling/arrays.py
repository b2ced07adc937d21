"""Encodes arrays in the requested format: rounded to a data type, as bytes in a byte order, or as base64.

The output is made in pieces, because the results of one input may have millions of values.

NumPy has neither bfloat16 nor float8: their bits are computed here, rounding to nearest, ties to even.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from quire.protocol.pooling.requests import EmbedDtype, Endianness

Array = NDArray[Any]
Floats = NDArray[np.float32]
_FLOAT8 = {"fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2)}  # bits of exponent and mantissa
_SCALE = 127
_AT_ONCE = 1 << 14  # numbers that are converted at a time: float8 takes the longest, about 1 ms


def cast(values: Floats, dtype: EmbedDtype) -> Array:
    """Values in a data type; data types that NumPy lacks are unsigned integers with the same bits.

    int8 and uint8 are scaled so that the largest value of a vector is 127 from the middle, which leaves cosines as they
    are. binary and ubinary have a bit for each value, 1 for positive ones, in bytes from -128 or from 0.
    """
    match dtype:
        case "float32":
            return values
        case "float16":
            return values.astype(np.float16)
        case "bfloat16":
            return _bfloat16_bits(values)
        case "fp8_e4m3" | "fp8_e5m2":
            return _float8_bits(values, *_FLOAT8[dtype])
        case "int8":
            return _scaled(values).astype(np.int8)
        case "uint8":
            return (_scaled(values) + 128).astype(np.uint8)
        case "binary":
            return (np.packbits(values > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)
        case "ubinary":
            return np.packbits(values > 0, axis=-1)


def round_values(values: Floats, dtype: EmbedDtype) -> Array:
    """Values rounded to a data type, as float32, for JSON."""
    bits = cast(values, dtype)
    match dtype:
        case "float16":
            return bits.astype(np.float32)
        case "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        case "fp8_e4m3" | "fp8_e5m2":
            return _float8_values(*_FLOAT8[dtype])[bits]
        case _:
            return bits


def to_bytes(values: Floats, dtype: EmbedDtype, endianness: Endianness) -> Iterator[bytes]:
    """The bytes of values in a data type, in pieces."""
    for block in _blocks(values):
        array = cast(block, dtype)
        if endianness not in ("native", sys.byteorder) and array.itemsize > 1:
            array = array.byteswap()
        yield array.tobytes()


def byte_size(values: Floats, dtype: EmbedDtype) -> int:
    """The number of these bytes."""
    return math.prod(shape_of(values, dtype)) * cast(values[:1], dtype).itemsize


def json_of(values: Floats, dtype: EmbedDtype) -> Iterator[bytes]:
    """Values in a data type as JSON, in pieces; NaN and infinite ones are null."""
    separator = b"["
    for block in _blocks(values):
        text = orjson.dumps(np.ascontiguousarray(round_values(block, dtype)), option=orjson.OPT_SERIALIZE_NUMPY)
        yield separator + text[1:-1]
        separator = b","
    yield b"]"


def base64_of(values: Floats, dtype: EmbedDtype, endianness: Endianness) -> Iterator[bytes]:
    """A JSON string with the bytes of values in base64, in pieces."""
    yield b'"'
    remainder = b""
    for block in to_bytes(values, dtype, endianness):
        data = remainder + block
        whole = len(data) - len(data) % 3  # three bytes are four characters
        yield base64.b64encode(data[:whole])
        remainder = data[whole:]
    yield base64.b64encode(remainder) + b'"'


def shape_of(values: Floats, dtype: EmbedDtype) -> Sequence[int]:
    """The shape of values in a data type."""
    *outer, size = values.shape
    return [*outer, -(-size // 8) if dtype in ("binary", "ubinary") else size]


def _blocks(values: Floats) -> Iterator[Floats]:
    """A vector, or some rows at a time of one vector for each token."""
    if values.ndim == 1 or not len(values):
        yield values
        return
    rows = max(1, _AT_ONCE // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]


def _scaled(values: Floats) -> Floats:
    values = np.nan_to_num(values)
    largest = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    return np.rint(values * (_SCALE / np.where(largest > 0, largest, 1)))


def _bfloat16_bits(values: Floats) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded_up = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.where(np.isnan(values), bits | 0x400000, rounded_up).astype(np.uint32).__rshift__(16).astype(np.uint16)


def _float8_bits(values: Floats, exponent: int, mantissa: int) -> Array:
    """The nearest float8 of each value; values beyond the largest one become that."""
    positive = _float8_values(exponent, mantissa)[:128]
    finite = positive[np.isfinite(positive)]
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(values)
    codes = np.searchsorted(middles, size)  # a tie becomes the lower one
    codes += (codes % 2 == 1) & (size == middles[np.minimum(codes, len(middles) - 1)])  # unless the upper one is even
    codes = np.where(np.isnan(values), 0x7F, np.minimum(codes, len(finite) - 1))
    return np.asarray(codes + 128 * np.signbit(values), np.uint8)


@cache
def _float8_values(exponent: int, mantissa: int) -> Floats:
    """The values of all 256 codes. e4m3 is the variant without infinity."""
    codes = np.arange(128)
    powers = codes >> mantissa
    fractions = codes & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    normal = (1 + fractions / (1 << mantissa)) * 2.0 ** (powers - bias)
    values = np.where(powers == 0, fractions / (1 << mantissa) * 2.0 ** (1 - bias), normal)
    if mantissa == 2:  # as in IEEE 754: the largest exponent is for infinity and NaN
        values[powers == (1 << exponent) - 1] = np.nan
        values[((1 << exponent) - 1) << mantissa] = np.inf
    else:
        values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)

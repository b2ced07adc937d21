"""Blocks of GGUF files as weights in groups.

What a block's codes stand for is kept without loss. The scale of a group of values is the product of that of the block
and that of the group, which float32 holds exactly. Codes of up to 4 bits take 4 bits, all others 8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import groups_of
from quire.engine.models.checkpoint.gguf.container import BlockKind
from quire.kernels.grouped_weight import GroupedWeight

# Kinds whose values are numbers of their own, in host order, since files are little-endian.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}
Blocks = Tensor  # (rows, blocks, bytes) uint8
_VALUES_AT_ONCE = 1 << 21  # bounds the memory that reading takes besides the result
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of FP4
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def stored_blocks(blocks: Blocks, kind: BlockKind, rows: Tensor | None = None) -> StoredGroups:
    """The weight in blocks of bytes.

    Args:
        blocks: of all rows.
        kind: of the blocks, none of `PLAIN`.
        rows: those of the weight, in its order; None: all of them.
    """
    size_in = blocks.shape[1] * kind.values
    reader = _READERS[kind.name]

    def read_part(wanted: slice, columns: slice) -> GroupedWeight:
        groups_of(columns, reader.group, size_in)
        begin, end, _ = columns.indices(size_in)
        first, last = begin // kind.values, -(-end // kind.values)
        inputs = slice(begin - first * kind.values, end - first * kind.values)
        chosen = blocks[wanted, first:last] if rows is None else blocks[:, first:last]
        return _read_all(reader, chosen, inputs, None if rows is None else rows[wanted])

    size_out = len(blocks) if rows is None else len(rows)
    return StoredGroups(size_out, size_in, read_part, size_out * blocks.shape[1] * kind.nbytes)


def with_columns(weight: StoredGroups, kind: BlockKind, columns: Tensor) -> StoredGroups | Tensor:
    """A weight whose inputs lie in another order in the file: in groups if these stay together, otherwise as numbers.

    `columns`: the input in the file that each input of the weight is.
    """
    group = _READERS[kind.name].group
    if len(columns) != weight.size_in or len(columns) % group:
        return weight  # the shape is refused when it is compared with the model's
    starts = columns.view(-1, group)[:, 0]
    if bool((starts % group).any()) or not torch.equal(columns, (starts[:, None] + torch.arange(group)).flatten()):
        return weight.dequantize(torch.float32)[:, columns]

    def read_part(wanted: slice, inputs: slice) -> GroupedWeight:
        groups_of(inputs, group, weight.size_in)
        begin, end, _ = inputs.indices(weight.size_in)
        places = starts[begin // group : end // group] // group
        stored = weight.read(wanted, slice(None))
        codes = stored.codes.unflatten(1, (stored.scales.shape[1], -1))[:, places].flatten(1)
        minimums = None if stored.minimums is None else stored.minimums[:, places]
        return replace(stored, codes=codes, scales=stored.scales[:, places], minimums=minimums)

    return replace(weight, read=read_part)


class _Reader(NamedTuple):
    """Reads a kind of blocks. `group`: values that share a scale."""

    group: int
    read: Callable[[Blocks], GroupedWeight]


def _read_all(reader: _Reader, blocks: Blocks, inputs: slice, rows: Tensor | None) -> GroupedWeight:
    """Read some inputs of blocks, a few rows at a time. `rows`: which, in this order; None: all."""
    count = len(blocks) if rows is None else len(rows)
    step = max(1, _VALUES_AT_ONCE // max(1, inputs.stop))

    def read(begin: int) -> GroupedWeight:
        part = slice(begin, begin + step)
        return _cut(reader.read(blocks[part] if rows is None else blocks[rows[part]]), inputs, reader.group)

    first = read(0)
    if step >= count:
        return first
    whole = replace(
        first,
        codes=_grown(first.codes, count),
        scales=_grown(first.scales, count),
        minimums=None if first.minimums is None else _grown(first.minimums, count),
    )
    for begin in range(step, count, step):
        part = read(begin)
        for target, source in ((whole.codes, part.codes), (whole.scales, part.scales), (whole.minimums, part.minimums)):
            if target is not None and source is not None:
                target[begin : begin + step] = source
    return whole


def _grown(first: Tensor, rows: int) -> Tensor:
    """A tensor of more rows, of which the first ones are there."""
    grown = first.new_empty(rows, *first.shape[1:])
    grown[: len(first)] = first
    return grown


def _cut(weight: GroupedWeight, inputs: slice, group: int) -> GroupedWeight:
    """Some inputs of a weight, which are whole groups."""
    if (inputs.start, inputs.stop) == (0, weight.shape[1]):
        return weight
    per_byte = 8 // weight.bits
    groups = slice(inputs.start // group, inputs.stop // group)
    return replace(
        weight,
        codes=weight.codes[:, inputs.start // per_byte : inputs.stop // per_byte],
        scales=weight.scales[:, groups],
        minimums=None if weight.minimums is None else weight.minimums[:, groups],
    )


def _numbers(blocks: Blocks, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Numbers at some bytes of each block: (rows, blocks, numbers)."""
    return blocks[..., begin:end].clone(memory_format=torch.contiguous_format).view(dtype)


def _half(blocks: Blocks, at: int) -> Tensor:
    """The number of 16 bits at a byte of each block: (rows, blocks, 1) float32."""
    return _numbers(blocks, at, at + 2, torch.float16).float()


def _words(blocks: Blocks, begin: int, end: int) -> Tensor:
    """Integers of 16 bits without sign at some bytes of each block."""
    return _numbers(blocks, begin, end, torch.int16).int() & 0xFFFF


def _bits(data: Tensor, width: int, count: int | None = None) -> Tensor:
    """Fields of `width` bits of integers, in a new last dimension, the lowest first. `count`: of them; None: 8 bits."""
    count = count or 8 // width
    return (data[..., None] >> torch.arange(0, count * width, width, dtype=data.dtype)) & ((1 << width) - 1)


def _bits_of(data: Tensor) -> Tensor:
    """The eight bits of bytes, in a new last dimension, the lowest first; faster than `_bits`."""
    bits: Tensor = _bits(torch.arange(256, dtype=torch.uint8), 1).view(torch.int64)[:, 0][data.int()]
    return bits[..., None].view(torch.uint8)


def _planes(data: Tensor, width: int, size: int) -> Tensor:
    """Fields of bytes: of `size` bytes their lowest fields, then their next ones, and so on.

    Returns:
        (rows, blocks, values).
    """
    data = data.unflatten(-1, (data.shape[-1] // size, size)).contiguous()
    count, mask = 8 // width, (1 << width) - 1
    fields = data.new_empty(*data.shape[:-1], count, size)
    for index in range(count):
        torch.bitwise_and(data >> index * width if index else data, mask, out=fields[..., index, :])
    return fields.flatten(-3)


def _packed(codes: Tensor) -> Tensor:
    """(rows, blocks, values) uint8 codes of 4 bits, as `GroupedWeight` has them."""
    pairs = codes.flatten(1).contiguous().view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def _affine(codes: Tensor, scales: Tensor, minimums: Tensor) -> GroupedWeight:
    return GroupedWeight(_packed(codes), scales.flatten(1), minimums.flatten(1))


def _shifted(codes: Tensor, scales: Tensor, offset: int) -> GroupedWeight:
    """Codes of 4 bits that stand for numbers which are lower by `offset`."""
    return _affine(codes, scales, scales * -offset)


def _tabled(codes: Tensor, scales: Tensor, table: tuple[int, ...]) -> GroupedWeight:
    return GroupedWeight(_packed(codes), scales.flatten(1), table=torch.tensor(table, dtype=torch.float32))


def _integers(codes: Tensor, scales: Tensor, minimums: Tensor | None = None) -> GroupedWeight:
    return GroupedWeight(codes.flatten(1), scales.flatten(1), None if minimums is None else minimums.flatten(1))


def _q4_0(blocks: Blocks) -> GroupedWeight:
    return _shifted(_planes(blocks[..., 2:], 4, 16), _half(blocks, 0), 8)


def _q4_1(blocks: Blocks) -> GroupedWeight:
    return _affine(_planes(blocks[..., 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Codes of 32 values, whose fifth bits lie in four bytes."""
    return (_planes(low, 4, 16) | _bits_of(high).flatten(-2) << 4).view(torch.int8)


def _q5_0(blocks: Blocks) -> GroupedWeight:
    return _integers(_five_bits(blocks[..., 6:], blocks[..., 2:6]) - 16, _half(blocks, 0))


def _q5_1(blocks: Blocks) -> GroupedWeight:
    return _integers(_five_bits(blocks[..., 8:], blocks[..., 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Blocks) -> GroupedWeight:
    return _integers(_numbers(blocks, 2, 34, torch.int8), _half(blocks, 0))


def _q2_k(blocks: Blocks) -> GroupedWeight:
    factors = blocks[..., :16]
    minimums = -(_half(blocks, 82) * (factors >> 4).float())
    return _affine(_planes(blocks[..., 16:80], 2, 32), _half(blocks, 80) * (factors & 15).float(), minimums)


def _q3_k(blocks: Blocks) -> GroupedWeight:
    codes = _planes(blocks[..., 32:96], 2, 32) | _planes(blocks[..., :32], 1, 32) << 2
    factors = _planes(blocks[..., 96:104], 4, 8) | _planes(blocks[..., 104:108], 2, 4) << 4
    return _shifted(codes, _half(blocks, 108) * (factors.float() - 32), 4)


def _scales_and_minimums(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Of the eight groups of a block of 256 values, from twelve bytes."""
    low, middle, high = (blocks[..., begin : begin + 4] for begin in (4, 8, 12))
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minimums.float())


def _q4_k(blocks: Blocks) -> GroupedWeight:
    return _affine(_planes(blocks[..., 16:], 4, 32), *_scales_and_minimums(blocks))


def _q5_k(blocks: Blocks) -> GroupedWeight:
    codes = _planes(blocks[..., 48:], 4, 32) | _planes(blocks[..., 16:48], 1, 32) << 4
    return _integers(codes.view(torch.int8), *_scales_and_minimums(blocks))


def _q6_k(blocks: Blocks) -> GroupedWeight:
    codes = _planes(blocks[..., :128], 4, 64) | _planes(blocks[..., 128:192], 2, 32) << 4
    factors = _numbers(blocks, 192, 208, torch.int8)
    return _integers(codes.view(torch.int8) - 32, _half(blocks, 208) * factors.float())


def _iq4_nl(blocks: Blocks) -> GroupedWeight:
    return _tabled(_planes(blocks[..., 2:], 4, 16), _half(blocks, 0), _IQ4)


def _iq4_xs(blocks: Blocks) -> GroupedWeight:
    high = _bits(_words(blocks, 2, 4), 2, 8).flatten(-2)
    factors = _bits(blocks[..., 4:8], 4).flatten(-2) | high << 4
    return _tabled(_planes(blocks[..., 8:], 4, 16), _half(blocks, 0) * (factors - 32).float(), _IQ4)


def _mxfp4(blocks: Blocks) -> GroupedWeight:
    exponents = blocks[..., :1].int()
    # Half of a power of two, by its bits: the two smallest are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _tabled(_planes(blocks[..., 1:], 4, 16), bits.int().view(torch.float32), _FP4)


def _nvfp4(blocks: Blocks) -> GroupedWeight:
    factors = blocks[..., :4].int()
    exponents, fractions = factors >> 3 & 15, (factors & 7).float()
    exact = torch.where(exponents == 0, fractions / 1024, torch.ldexp(8 + fractions, exponents - 11))
    scales = torch.where(factors == 0x7F, 0.0, exact)  # NaN stands for zero
    return _tabled(_planes(blocks[..., 4:], 4, 8), scales, _FP4)


def _q1_0(blocks: Blocks) -> GroupedWeight:
    scales = _half(blocks, 0)
    return _affine(_bits(blocks[..., 2:], 1).flatten(-2), 2 * scales, -scales)


def _q2_0(blocks: Blocks) -> GroupedWeight:
    return _shifted(_bits(blocks[..., 2:], 2).flatten(-2), _half(blocks, 0), 1)


def _tq1_0(blocks: Blocks) -> GroupedWeight:
    def digits(data: Tensor, count: int) -> Tensor:
        """Digits of base 3, of which a byte holds several, as a fraction of 256."""
        powers = torch.tensor([3**index for index in range(count)], dtype=torch.int32)
        fractions = (data.int()[..., None, :] * powers[:, None]) & 0xFF
        return (fractions * 3 >> 8).flatten(-2).to(torch.uint8)

    codes = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)]
    return _shifted(torch.cat(codes, -1), _twice(_half(blocks, 52)), 1)


def _tq2_0(blocks: Blocks) -> GroupedWeight:
    return _shifted(_planes(blocks[..., :64], 2, 32), _twice(_half(blocks, 64)), 1)


def _twice(scales: Tensor) -> Tensor:
    """The scale of a block of 256 values for both of its halves, as kernels have groups of up to 128 values."""
    return scales.repeat(1, 1, 2)


def _iq2_xxs(blocks: Blocks) -> GroupedWeight:
    words = _numbers(blocks, 2, 66, torch.int32)[..., 1::2].long()
    places = blocks[..., 2:].unflatten(-1, (8, 8))[..., :4].flatten(-2)
    codes = _points("IQ2_XXS", places) * _signs(_bits(words, 7, 4).flatten(-2))
    return _integers(codes.flatten(-2), _half(blocks, 0) * (0.5 + (words >> 28 & 15).float()) * 0.25)


def _iq2_xs(blocks: Blocks) -> GroupedWeight:
    words = _words(blocks, 2, 66)
    codes = _points("IQ2_XS", words & 511) * _signs(words >> 9)
    return _integers(codes.flatten(-2), _half(blocks, 0) * _quarters(blocks[..., 66:]))


def _iq2_s(blocks: Blocks) -> GroupedWeight:
    places = blocks[..., 2:34].int() | _bits(blocks[..., 66:74], 2).flatten(-2).int() << 8
    codes = _points("IQ2_S", places) * _signs_of_bits(blocks[..., 34:66])
    return _integers(codes.flatten(-2), _half(blocks, 0) * _quarters(blocks[..., 74:]))


def _quarters(data: Tensor) -> Tensor:
    """Scales of two groups in a byte, each a quarter of a half."""
    return (0.5 + _bits(data, 4).flatten(-2).float()) * 0.25


def _iq3_xxs(blocks: Blocks) -> GroupedWeight:
    words = _numbers(blocks, 66, 98, torch.int32).long()
    signs = _signs(_bits(words, 7, 4).flatten(-2))
    codes = _points("IQ3_XXS", blocks[..., 2:66]).flatten(-2) * signs.flatten(-2)
    return _integers(codes, _half(blocks, 0) * (0.5 + (words >> 28 & 15).float()) * 0.5)


def _iq3_s(blocks: Blocks) -> GroupedWeight:
    places = blocks[..., 2:66].int() | _bits(blocks[..., 66:74], 1).flatten(-2).int() << 8
    codes = _points("IQ3_S", places).flatten(-2) * _signs_of_bits(blocks[..., 74:106]).flatten(-2)
    return _integers(codes, _half(blocks, 0) * (1 + 2 * _bits(blocks[..., 106:], 4).flatten(-2).float()))


def _iq1_s(blocks: Blocks) -> GroupedWeight:
    words = _words(blocks, 34, 50)
    places = blocks[..., 2:34].int() | _bits(words, 3, 4).flatten(-2) << 8
    steps = 1 - 2 * (words >> 15)
    codes = 8 * _points("IQ1_S", places) + steps.repeat_interleave(4, -1)[..., None]
    return _integers(codes.flatten(-2).to(torch.int8), _half(blocks, 0) * (2 * (words >> 12 & 7) + 1).float() / 8)


def _iq1_m(blocks: Blocks) -> GroupedWeight:
    words = _words(blocks, 48, 56)
    whole = sum((words[..., index] >> 12) << 4 * index for index in range(4))
    assert isinstance(whole, Tensor)
    fields = _bits(blocks[..., 32:48], 4).flatten(-2).int()
    codes = 8 * _points("IQ1_M", blocks[..., :32].int() | (fields & 7) << 8) + (1 - 2 * (fields >> 3))[..., None]
    factors = 2 * _bits(words, 3, 4).flatten(-2) + 1
    scales = whole.to(torch.int16).view(torch.float16).float()[..., None] * factors.float() / 8
    return _integers(codes.flatten(-2).to(torch.int8), scales)


def _signs(data: Tensor) -> Tensor:
    """Eight signs of each seven bits, of which an even number is negative: (..., 8) int8."""
    parity = data ^ data >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    return _signs_of_bits((data | parity << 7).to(torch.uint8))


def _signs_of_bits(data: Tensor) -> Tensor:
    """Eight signs of each byte: (..., 8) int8."""
    return 1 - 2 * _bits_of(data).view(torch.int8)


def _points(kind: str, places: Tensor) -> Tensor:
    """Values at places of a kind's code book: (..., values) int8."""
    points: Tensor = _code_book(kind)[places.int()]
    return points


@cache
def _code_book(kind: str) -> Tensor:
    """The code book of a kind of blocks. It has no formula: it is read from the package `gguf`, if a file needs it."""
    quants: Any = importlib.import_module("gguf.quants")
    book = getattr(quants, kind)
    book.init_grid()
    return torch.from_numpy(book.grid.reshape(book.grid_shape)).to(torch.int8)


_READERS = {
    "IQ1_M": _Reader(16, _iq1_m),
    "IQ1_S": _Reader(32, _iq1_s),
    "IQ2_S": _Reader(16, _iq2_s),
    "IQ2_XS": _Reader(16, _iq2_xs),
    "IQ2_XXS": _Reader(32, _iq2_xxs),
    "IQ3_S": _Reader(32, _iq3_s),
    "IQ3_XXS": _Reader(32, _iq3_xxs),
    "IQ4_NL": _Reader(32, _iq4_nl),
    "IQ4_XS": _Reader(32, _iq4_xs),
    "MXFP4": _Reader(32, _mxfp4),
    "NVFP4": _Reader(16, _nvfp4),
    "Q1_0": _Reader(128, _q1_0),
    "Q2_0": _Reader(64, _q2_0),
    "Q2_K": _Reader(16, _q2_k),
    "Q3_K": _Reader(16, _q3_k),
    "Q4_0": _Reader(32, _q4_0),
    "Q4_1": _Reader(32, _q4_1),
    "Q4_K": _Reader(32, _q4_k),
    "Q5_0": _Reader(32, _q5_0),
    "Q5_1": _Reader(32, _q5_1),
    "Q5_K": _Reader(32, _q5_k),
    "Q6_K": _Reader(16, _q6_k),
    "Q8_0": _Reader(32, _q8_0),
    "TQ1_0": _Reader(128, _tq1_0),
    "TQ2_0": _Reader(128, _tq2_0),
}

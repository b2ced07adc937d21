"""Blocks of GGUF files as weights in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import groups_of
from quire.engine.models.checkpoint.gguf.container import BlockKind
from quire.kernels.grouped_weight import GroupedWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Blocks = Tensor  # (rows, blocks, bytes) uint8


def stored_blocks(blocks: Blocks, kind: BlockKind, rows: Tensor | None = None) -> StoredGroups:
    """The weight in blocks of bytes.

    Args:
        blocks: of all rows.
        kind: of the blocks.
        rows: those of the weight, in its order; None: all of them.
    """
    size_in = blocks.shape[1] * kind.values
    read = _READERS[kind.name]

    def read_part(wanted_rows: slice, columns: slice) -> GroupedWeight:
        begin, end, _ = columns.indices(size_in)
        first, last = begin // kind.values, -(-end // kind.values)
        chosen = blocks[wanted_rows] if rows is None else blocks[rows[wanted_rows]]
        weight = read(chosen[:, first:last])
        return _columns(weight, slice(begin - first * kind.values, end - first * kind.values))

    size_out = len(blocks) if rows is None else len(rows)
    return StoredGroups(size_out, size_in, read_part, size_out * blocks.shape[1] * kind.nbytes)


def _columns(weight: GroupedWeight, columns: slice) -> GroupedWeight:
    """A part of the inputs of a weight.

    Raises:
        UnsupportedModel: a border is inside of a group.
    """
    size_in = weight.shape[1]
    if (columns.start, columns.stop) == (0, size_in):
        return weight
    groups = groups_of(columns, weight.group, size_in)
    per_byte = 8 // weight.bits
    return replace(
        weight,
        codes=weight.codes[:, columns.start // per_byte : columns.stop // per_byte],
        scales=weight.scales[:, groups],
        minimums=None if weight.minimums is None else weight.minimums[:, groups],
    )


def _halves(blocks: Blocks, at: int) -> Tensor:
    """The number of 16 bits at a byte of each block, as float32: (rows, blocks)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(data: Tensor) -> Tensor:
    """The lower halves of bytes, then the upper ones, in the last dimension."""
    return torch.cat((data & 15, data >> 4), -1)


def _packed(codes: Tensor) -> Tensor:
    """(rows, ..., values) codes of 4 bits, as `GroupedWeight` has them."""
    flat = codes.flatten(1)
    return flat[:, ::2] | flat[:, 1::2] << 4


def _high_bits(blocks: Blocks, at: int) -> Tensor:
    """The fifth bits of 32 values, which lie in four bytes."""
    return ((blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(blocks: Blocks) -> GroupedWeight:
    scales = _halves(blocks, 0)
    return GroupedWeight(_packed(_nibbles(blocks[..., 2:])), scales, -8 * scales)


def _q4_1(blocks: Blocks) -> GroupedWeight:
    return GroupedWeight(_packed(_nibbles(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Blocks) -> GroupedWeight:
    codes = (_nibbles(blocks[..., 6:]) | _high_bits(blocks, 2) << 4).to(torch.int8) - 16
    return GroupedWeight(codes.flatten(1), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> GroupedWeight:
    codes = (_nibbles(blocks[..., 8:]) | _high_bits(blocks, 4) << 4).to(torch.int8)
    return GroupedWeight(codes.flatten(1), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Blocks) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0))


def _scales_and_minimums(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Of the eight groups of a block of 256 values, from twelve bytes: (rows, blocks * 8)."""
    data = blocks[..., 4:16]
    low, middle, high = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    whole, least = _halves(blocks, 0)[..., None], _halves(blocks, 2)[..., None]
    return (whole * scales.float()).flatten(1), -(least * minimums.float()).flatten(1)


def _q4_k(blocks: Blocks) -> GroupedWeight:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return GroupedWeight(_packed(codes), *_scales_and_minimums(blocks))


def _q5_k(blocks: Blocks) -> GroupedWeight:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return GroupedWeight((low | high << 4).to(torch.int8).flatten(1), *_scales_and_minimums(blocks))


def _q6_k(blocks: Blocks) -> GroupedWeight:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of the block, then halves of their bytes
    low = torch.cat((low & 15, low >> 4), -2)  # (rows, blocks, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    codes = (low | high << 4).to(torch.int8) - 32
    scales = _halves(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return GroupedWeight(codes.flatten(1), scales.flatten(1))


_READERS: dict[str, Callable[[Blocks], GroupedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}

"""PackedGroups: weights in groups as the compiled kernels multiply with them; see ``csrc/grouped_weight.h``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty
from quire.kernels.grouped_weight import GroupedWeight, checked_order, common_zero, row_powers
from quire.kernels.huge_pages import empty_in_huge_pages
from quire.kernels.panels import PANEL, write_panels
from quire.kernels.saved_weight import SavedWeight

_STEP = 16  # inputs of the smallest group
_BLOCK = 32  # inputs that weights are padded to whole numbers of
_SUPER = 256  # inputs whose scales share a factor if they are integers
_OFFSETS_OF_4_BITS = range(-1, 17)  # with which sums of 32 products stay below what the kernels have room for
_OUTPUTS = 32 * PANEL  # packed at a time, which takes several times their memory
_SAMPLES = 16
_TRIED = 1 << 20  # quotients at a time
_EXACT = 2e-4  # distance from an integer up to which a quotient is one
# Integers of the largest of some scales: those of formats, 63 of Q4_K and Q5_K and -128 of Q6_K, then all others.
_LARGEST = (
    torch.tensor([63.0, -128.0]),
    torch.tensor([float(largest) for largest in range(1, 128) if largest != 63]),
)


class PackedGroups:
    """A weight (size_out, size_in) whose rows are those of one or several parts, each in panels of its own.

    A product rounds each row of inputs to int8, with a scale for each 32 of them, and is one of integers then. Scales
    and minimums are rounded to float16 times a power of two for each output, a relative error of up to 2^-12; codes are
    not rounded. The values of a table are rounded to integers up to 127: nf4's by up to 1/254 of the largest, those of
    other formats are such integers times a number.
    """

    def __init__(self, parts: Sequence[GroupedWeight], dtype: torch.dtype, *, compact: bool = True) -> None:
        """Pack a weight.

        Args:
            parts: see `can_pack`.
            dtype: of the rows that are read from it.
            compact: look for what the weights' values allow: codes of 6 bits, scales of 6 or 8 bits, no minimums.
                Otherwise the layout depends on that of the parts alone, so that other weights can take their place.
        """
        self._set(dtype, [_Panels(part, compact=compact) for part in parts])

    def saved(self) -> SavedWeight:
        """The weight as tensors and facts; `restored` makes it of them."""
        facts = [part.facts() for part in self._parts]
        tensors = {f"{index}.{name}": x for index, part in enumerate(self._parts) for name, x in part.tensors().items()}
        return SavedWeight("groups", {"dtype": str(self._dtype).removeprefix("torch."), "parts": facts}, tensors)

    @classmethod
    def restored(cls, saved: SavedWeight) -> Self:
        """The weight that was `saved`. Its tensors are used as they are, and not checked."""
        weight = cls.__new__(cls)
        parts = []
        for index, facts in enumerate(saved.facts["parts"]):
            names = {name.partition(".")[2]: x for name, x in saved.tensors.items() if name.startswith(f"{index}.")}
            parts.append(_Panels.restored(facts, names))
        weight._set(getattr(torch, saved.facts["dtype"]), parts)
        return weight

    def _set(self, dtype: torch.dtype, parts: list[_Panels]) -> None:
        self._dtype = dtype
        self._parts = parts
        self.size_in = parts[0].size_in
        self.size_out = sum(part.size_out for part in self._parts)
        self.nbytes = sum(part.nbytes for part in self._parts)

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """act(x W^T + b); see `PackedWeight`."""
        if x.dtype == torch.float16:  # which the kernels do not read
            y = self(x.float(), bias, act=act)
            return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)
        x = x if x.stride(1) == 1 else x.contiguous()
        if out is None:
            out = empty((len(x), self.size_out), out_dtype or x.dtype)
        if len(self._parts) == 1:
            self._parts[0].multiply(x, bias, act, out)
            return out
        begin = 0
        for part in self._parts:
            end = begin + part.size_out
            part.multiply(x, None if bias is None else bias[begin:end], act, out[:, begin:end])
            begin = end
        return out

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the weight stands for: (size_out, size_in)."""
        return torch.cat([part.rows(torch.arange(part.size_out), dtype) for part in self._parts])

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of a weight of one part by their indices, dequantized: (n, size_in)."""
        (part,) = self._parts
        if self._dtype == torch.float16:
            return part.rows(indices, torch.float32).half()
        return part.rows(indices, self._dtype)


class _Panels:
    """One part of a weight."""

    def __init__(self, weight: GroupedWeight, *, compact: bool) -> None:
        self.size_out, self.size_in = weight.shape
        group = _kernel_group(weight)
        assert group is not None
        scales, minimums = weight.scales, weight.minimums
        self._order = None if weight.order is None else checked_order(weight.order, self.size_in).int()
        self._table: Tensor | None = None
        if weight.table is not None:
            self._table, unit = _integers(weight.table)
            scales = scales * unit
        zero = common_zero(scales, minimums) if compact and self._table is None else None
        if weight.bits == 4 and zero not in _OFFSETS_OF_4_BITS:
            zero = None
        if zero is not None:
            minimums = None
        bits, added = _bits_and_added(weight, zero or 0, compact=compact)
        offset = 128 if self._table is not None else added + (zero or 0)
        if (repeats := weight.group // group) > 1:  # groups of an odd number of 16 inputs
            scales = scales.repeat_interleave(repeats, 1)
            minimums = None if minimums is None else minimums.repeat_interleave(repeats, 1)

        levels = [scales] if minimums is None else [scales, minimums]
        pairs = [_two_levels(level, _SUPER // group) for level in levels] if compact and group <= _BLOCK else [None]
        scale_bits = _scale_bits(pairs, group, self.size_in)
        factors, sections = _scale_sections(levels, pairs, -(-self.size_in // _BLOCK), group, scale_bits)
        layout = {
            "bits": bits,
            "group": group,
            "offset": offset,
            "scale_bits": scale_bits,
            "minimums": int(minimums is not None),
        }
        self._set(layout, _packed(weight, bits, added, sections), factors)

    def facts(self) -> Mapping[str, Any]:
        """What it is beside its tensors."""
        return {"size_out": self.size_out, "size_in": self.size_in, "format": self._format}

    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by name."""
        tensors = {
            "data": self._data[self._layout], "factors": self._factors, "table": self._table, "order": self._order
        }  # fmt: skip
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def restored(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The part with these facts and tensors."""
        part = cls.__new__(cls)
        part.size_out, part.size_in = facts["size_out"], facts["size_in"]
        part._table, part._order = tensors.get("table"), tensors.get("order")
        part._set(dict(facts["format"]), tensors["data"], tensors["factors"])
        return part

    def _set(self, layout: dict[str, int], data: Tensor, factors: Tensor) -> None:
        self._format = layout
        # Named for its layout: weights of another one that are to take its place are refused for want of the name.
        self._layout = ", ".join(f"{name} {value}" for name, value in layout.items())
        self._data, self._factors = {self._layout: data}, factors
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def multiply(self, x: Tensor, bias: Tensor | None, act: str | None, out: Tensor) -> None:
        native.kernels.grouped_linear(
            x=x,
            weight=self._data[self._layout],
            factors=self._factors,
            table=self._table,
            order=self._order,
            bias=bias,
            out=out,
            act=act,
            **self._format,
        )

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        out = empty((len(indices), self.size_in), dtype)
        native.kernels.grouped_rows(
            weight=self._data[self._layout],
            factors=self._factors,
            table=self._table,
            order=self._order,
            size=self.size_out,
            indices=indices,
            out=out,
            **self._format,
        )
        return out


def can_pack(weight: GroupedWeight) -> bool:
    """Whether the kernels read a weight: one group a row, or groups of a multiple of 16 inputs."""
    return _kernel_group(weight) is not None


def _kernel_group(weight: GroupedWeight) -> int | None:
    """Inputs of a group as the kernels have it, of which one of the weight's may be several."""
    size_in, groups = weight.shape[1], weight.scales.shape[1]
    if groups == 1:
        return -(-size_in // _BLOCK) * _BLOCK
    if weight.group % _BLOCK == 0:
        return weight.group
    return _STEP if weight.group % _STEP == 0 else None


def _integers(table: Tensor) -> tuple[Tensor, float]:
    """The closest integers up to 127 to multiples of a table's values, plus 128 as bytes, and what they are times."""
    values = table.double()
    largest = float(values.abs().max()) or 1.0
    counts = torch.arange(1, 128, dtype=torch.float64)
    multiples = values / largest * counts[:, None]
    errors = (multiples - multiples.round()).abs().amax(1) / counts
    exact = (
        errors < 1e-9
    ).nonzero()  # the smallest such integers leave scales as they are, e2m1's times a power of two
    best = int(exact[0] if len(exact) else errors.argmin())
    codes = (multiples[best].round() + 128).to(torch.uint8)
    return codes.view(torch.int8), largest / float(counts[best])


def _bits_and_added(weight: GroupedWeight, zero: int, *, compact: bool) -> tuple[int, int]:
    """Bits of a code as it is packed, and what is added so that there are no negative ones.

    Codes of 6 bits are those minus `zero`, so that sums of products with them stay small.
    """
    if weight.bits == 4:
        return 4, 0
    if weight.six_bits and zero == 0:
        return 6, 32
    low, high = (int(extreme) for extreme in weight.codes.aminmax()) if weight.codes.numel() else (zero, zero)
    return (6, 32 - zero) if compact and low - zero >= -32 and high - zero < 32 else (8, 128)


def _two_levels(values: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
    """The int8 numbers and the factors that float16 has whose products some scales are, as in GGUF's K-quants.

    Args:
        values: (rows, size).
        groups: neighbouring scales of a row that share a factor.

    Returns:
        (rows, size) int8 and (rows, ceil(size / groups)) float32; None if they are no such products.
    """
    rows, size = values.shape
    supers = F.pad(values, (0, -size % groups)).reshape(-1, groups)
    if not len(supers) or _common_factors(supers[:: max(1, len(supers) // _SAMPLES)]) is None:
        return None
    pair = _common_factors(supers)
    if pair is None:
        return None
    integers, factors = pair
    return integers.view(rows, -1)[:, :size], factors.view(rows, -1)


def _common_factors(supers: Tensor) -> tuple[Tensor, Tensor] | None:
    """The int8 numbers (n, groups) and the factors (n, 1) of some scales (n, groups); see `_two_levels`."""
    extremes = supers.gather(1, supers.abs().argmax(1, keepdim=True))
    integers, factors = torch.zeros(supers.shape, dtype=torch.int8), torch.zeros_like(extremes)
    pending = extremes[:, 0].nonzero()[:, 0]
    for largest in _LARGEST:
        unsolved = []
        for some in pending.split(_TRIED // (len(largest) * supers.shape[1])):
            factor = extremes[some] / largest[:, None, None]  # (largest, n, 1)
            quotients = supers[some] / factor
            rounded = quotients.round()
            fits = ((quotients - rounded).abs() <= _EXACT) & (rounded < 128) & _is_short(factor)
            fitting, first = fits.all(2).max(0)
            indices = torch.arange(len(some))
            chosen = some[fitting]
            integers[chosen] = rounded[first, indices][fitting].to(torch.int8)
            factors[chosen] = factor[first, indices][fitting]
            unsolved.append(some[~fitting])
        pending = torch.cat(unsolved) if unsolved else pending
    return None if len(pending) else (integers, factors)


def _is_short(values: Tensor) -> Tensor:
    """Whether values have the 11 bits of float16."""
    mantissas = values.frexp().mantissa * 2048
    return mantissas == mantissas.round()


def _scale_bits(pairs: Sequence[tuple[Tensor, Tensor] | None], group: int, size_in: int) -> int:
    """Bits of a scale as it is packed. pairs: integers and factors of scales and of minimums; None: there are none."""
    if None in pairs:
        return 16
    is_short = all(bool(((integers >= 0) & (integers < 64)).all()) for integers, _ in filter(None, pairs))
    return 6 if is_short and group == _BLOCK and size_in % _SUPER == 0 else 8


def _scale_sections(
    levels: Sequence[Tensor],
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    blocks: int,
    group: int,
    scale_bits: int,
) -> tuple[Tensor, list[Tensor]]:
    """The factors of outputs, and what panels hold of scales and minimums: (panels, words) int32.

    Args:
        levels: scales, and minimums if there are any: (size_out, groups).
        pairs: what they are products of, or None among others.
        blocks: blocks of inputs, whole ones.
        group: inputs that share a scale.
        scale_bits: of the integers.
    """
    two_levels = [pair for pair in pairs if pair is not None]
    floats = [factors for _, factors in two_levels] if len(two_levels) == len(levels) else levels
    powers = row_powers(floats)
    inverses = (1 / powers)[:, None]
    factors = F.pad(powers, (0, -len(powers) % PANEL))
    groups = -(-blocks * _BLOCK // group)
    halves = [
        _panel_words((values.float() * inverses).half(), 1 if floats is not levels else groups) for values in floats
    ]
    if floats is levels:
        return factors, halves
    if scale_bits == 6:
        integers = [_panel_words(_bytes_of_6_bits(values), 0) for values, _ in two_levels]
    else:
        integers = [_panel_words(values, groups + groups % 2) for values, _ in two_levels]
    return factors, [section for both in zip(integers, halves, strict=True) for section in both]


def _bytes_of_6_bits(values: Tensor) -> Tensor:
    """Of each four numbers below 64 the first three with two bits of the fourth above them.

    Args:
        values: (rows, a multiple of 4) int8.

    Returns:
        (rows, three quarters of that) uint8
    """
    fours = values.view(torch.uint8).unflatten(1, (-1, 4))
    parts = fours[..., 3:] >> torch.tensor([0, 2, 4], dtype=torch.uint8)
    packed: Tensor = fours[..., :3] | (parts & 3) << 6
    return packed.flatten(1)


def _panel_words(values: Tensor, columns: int) -> Tensor:
    """(rows, n) of numbers as (panels, words) int32, column by column; there are at least `columns`, 0 at the end."""
    rows, size = values.shape
    padded = F.pad(values, (0, max(0, columns - size), 0, -rows % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    words: Tensor = panels.flatten(1).view(torch.int32)
    return words


def _packed(weight: GroupedWeight, bits: int, added: int, sections: Sequence[Tensor]) -> Tensor:
    """The panels of a weight: (panels, words) int32."""
    size_out, size_in = weight.shape
    blocks = -(-size_in // _BLOCK)
    words = blocks * _BLOCK * bits // 32 * PANEL
    widths = [*(section.shape[1] for section in sections), words]
    data = empty_in_huge_pages((-(-size_out // PANEL), sum(widths)), torch.int32)
    *places, codes = data.split(widths, 1)
    for into, section in zip(places, sections, strict=True):
        into.copy_(section)
    padding = blocks * _BLOCK * weight.bits // 8 - weight.codes.shape[1]
    for begin in range(0, size_out, _OUTPUTS):
        part = F.pad(weight.codes[begin : begin + _OUTPUTS], (0, padding))
        row_words = _words_of_4_bits(part) if bits == 4 else _words_of_bytes(part.view(torch.uint8) + added, bits)
        panels = codes[begin // PANEL : (begin + _OUTPUTS) // PANEL]
        write_panels(row_words, panels.unflatten(1, (-1, PANEL)))
    return data


def _words_of_4_bits(codes: Tensor) -> Tensor:
    """Words of quads, two in the halves of the same bytes. codes: (rows, inputs / 2), those of two inputs."""
    first, second = codes.unflatten(1, (-1, 2, 2)).unbind(2)
    even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    return torch.stack((even, odd), 3).flatten(1).view(torch.int32)


def _words_of_bytes(codes: Tensor, bits: int) -> Tensor:
    """Words of quads of codes (rows, inputs) of 8 or 6 bits."""
    if bits == 8:
        return codes.contiguous().view(torch.int32)
    quads = codes.unflatten(1, (-1, 4, 4))  # (rows, steps, quads, inputs)
    lower, upper = quads & 15, quads >> 4
    pairs = lower[:, :, 0::2] | lower[:, :, 1::2] << 4
    first, second, third, fourth = upper.unbind(2)
    top = first | second << 2 | third << 4 | fourth << 6
    return torch.cat((top[:, :, None], pairs), 2).flatten(1).view(torch.int32)

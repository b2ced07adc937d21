"""A format of weights for tests, which is not one of Quire's: groups of 8-bit integers in two tensors, with scales.

A kernel for it multiplies with the weights as they are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    PackableWeight,
    StoredTensors,
    WeightFormat,
    Window,
    groups_of,
)
from quire.engine.models.errors import BrokenFolder

METHOD = "toy"
_LOW, _HIGH, _SCALES = ".low", ".high", ".group_scales"


@dataclass(frozen=True)
class ToyWeight(PackableWeight):
    """Integers, of which each has its lower four bits in one tensor, and the others in another one.

    Attributes:
        low, high: (size_out, size_in) uint8.
        scales: (size_out, groups).
        has_kernel: whether the kernel is there.
    """

    low: Tensor
    high: Tensor
    scales: Tensor
    has_kernel: bool

    @property
    def group(self) -> int:
        return self.low.shape[1] // self.scales.shape[1]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)

    @property
    @override
    def nbytes(self) -> int:
        return self.low.nbytes + self.high.nbytes + self.scales.nbytes

    @override
    def part(self, window: Window) -> Self:
        rows, columns = (*window, slice(None), slice(None))[:2]
        groups = groups_of(columns, self.group, self.low.shape[1])
        low, high = (codes[rows, columns] for codes in (self.low, self.high))
        return replace(self, low=low, high=high, scales=self.scales[rows, groups])

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        integers = (self.low | self.high << 4).view(torch.int8).float()
        numbers: Tensor = integers.unflatten(1, (-1, self.group)) * self.scales[..., None].float()
        return numbers.flatten(1).to(dtype)

    @override
    def is_finite(self) -> bool:
        return bool(self.scales.isfinite().all())

    @override
    def copied(self) -> Self:
        return replace(self, low=self.low.clone(), high=self.high.clone(), scales=self.scales.clone())

    @override
    def can_pack(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.has_kernel

    @classmethod
    @override
    def pack(cls, parts: Sequence[Self], dtype: torch.dtype, device: torch.device) -> ToyKernel | None:
        if len({part.group for part in parts}) > 1:
            return None
        low, high, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("low", "high", "scales"))
        return ToyKernel(cls(low, high, scales, has_kernel=True))


class ToyKernel:
    """Multiply with a weight as it is stored."""

    def __init__(self, weight: ToyWeight) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x W^T + b."""
        assert act is None
        y = F.linear(x, self.weight.dequantize(x.dtype), bias)
        return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


class ToyFormat(WeightFormat):
    """The format, of which config.json says whether there is a kernel."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._has_kernel = section["has_kernel"]

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        if not name.endswith(_LOW):
            return None
        module = name.removesuffix(_LOW)
        names = module + _HIGH, module + _SCALES
        if missing := [other for other in names if other not in stored]:
            raise BrokenFolder(f"{name} has no {missing[0]}")
        weight = ToyWeight(stored[name], stored[names[0]], stored[names[1]], self._has_kernel)
        return NamedWeight(f"{module}.weight", weight, names)

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.endswith((_HIGH, _SCALES))


def quantize(folder: Path, *, group: int | Callable[[str], int | None] = 8, has_kernel: bool = True) -> None:
    """Put a folder's projections into the format, and leave the folder's dequantized twin beside it, see `twin_of`.

    `group`: inputs that share a scale, by the weight's name; None: it stays plain.
    """
    weights, twin = load_file(folder / "model.safetensors"), twin_of(folder)
    config = json.loads((folder / "config.json").read_text())
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    stored, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        size = (group if callable(group) else lambda _: group)(name)
        if not name.endswith("_proj.weight") or size is None:
            continue
        groups = weight.float().unflatten(1, (-1, size))
        scales = groups.abs().amax(2) / 127
        codes = (groups / scales[..., None]).round().to(torch.int8).flatten(1).view(torch.uint8)
        toy = ToyWeight(codes & 15, codes >> 4, scales, has_kernel)
        module = name.removesuffix(".weight")
        del stored[name]
        stored |= {module + _LOW: toy.low, module + _HIGH: toy.high, module + _SCALES: toy.scales}
        plain[name] = toy.dequantize(weight.dtype)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": METHOD, "has_kernel": has_kernel}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def twin_of(folder: Path) -> Path:
    """The folder with the same weights, dequantized."""
    return folder.with_name(f"{folder.name}-twin")

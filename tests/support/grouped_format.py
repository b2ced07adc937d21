"""A format of weights for tests, which is not one of Quire's: groups of 4 or 8 bits, in tensors of codes and scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat, groups_of
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.quantized import quantize_groups

METHOD = "groups"
_CODES, _SCALES, _MINIMUMS = ".codes", ".group_scales", ".group_minimums"


class GroupedFormat(WeightFormat):
    """The format."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        pass

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        if not name.endswith(_CODES):
            return None
        module = name.removesuffix(_CODES)
        codes, scales, minimums = stored[name], stored[module + _SCALES], stored.get(module + _MINIMUMS)
        whole = GroupedWeight(codes, scales, minimums)
        size_out, size_in = whole.shape

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = groups_of(columns, whole.group, size_in)
            begin, end, _ = columns.indices(size_in)
            part = slice(begin * whole.bits // 8, end * whole.bits // 8)
            least = None if minimums is None else minimums[rows, groups]
            return GroupedWeight(codes[rows, part], scales[rows, groups], least)

        names = tuple(module + kind for kind in (_SCALES, _MINIMUMS) if module + kind in stored)
        return NamedWeight(f"{module}.weight", StoredGroups(size_out, size_in, read, whole.nbytes), names)

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.endswith((_SCALES, _MINIMUMS))


def quantize(folder: Path, kind: Callable[[str], str | None]) -> Path:
    """Put a folder's matrices into the format, and make the folder's dequantized twin beside it, which is returned.

    `kind`: "int4", "int8", or None for a weight that stays plain, by its name.
    """
    weights, twin = load_file(folder / "model.safetensors"), folder.with_name(f"{folder.name}-twin")
    config = json.loads((folder / "config.json").read_text())
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    stored, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        chosen = kind(name)
        if weight.dim() != 2 or chosen is None:
            continue
        groups = quantize_groups(weight, chosen)
        assert groups is not None
        module = name.removesuffix(".weight")
        del stored[name]
        stored |= _tensors(module, groups)
        plain[name] = groups.dequantize(weight.dtype)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": METHOD}}))
    return twin


def _tensors(module: str, groups: GroupedWeight) -> dict[str, Tensor]:
    tensors = {module + _CODES: groups.codes, module + _SCALES: groups.scales}
    if groups.minimums is not None:
        tensors[module + _MINIMUMS] = groups.minimums
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def packed_names(model: torch.nn.Module) -> set[str]:
    """The ends of the names of layers that multiply with weights as they are stored, or read rows of them."""
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if "PackedGroups" in {type(getattr(module, attribute, None)).__name__ for attribute in ("packed", "_packed")}
    }

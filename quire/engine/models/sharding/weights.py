"""Loads one rank's part of a decoder's weights; the rest is not read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.weight_format import PackableWeight, Window
from quire.engine.models.checkpoint.weights import WeightFiller
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.sharding.weight_shards import WeightShards
from quire.engine.models.specs.tensor_names import WeightNames, WeightTarget

_LAYER = re.compile(r"layers\.(\d+)\.")


class ShardedWeightFiller(WeightFiller):
    """Copy the parts of a checkpoint's tensors that a rank has.

    Tensors that are reordered, as those with the queries of each key head beside the key, are read whole.

    Attributes:
        bytes_read: bytes of the checkpoint that were copied.
    """

    def __init__(self, model: ShardedDecoder, names: WeightNames, shards: WeightShards, **options: Any) -> None:
        """`options`: those of `WeightFiller`."""
        super().__init__(model, names, **options)
        self.targets = shards.parameters
        self.num_layers = shards.num_layers
        self.bytes_read = 0
        self._shards = shards
        self._cut: set[str] = set()  # tensors that were cut when they were read

    @override
    def window(self, name: str, shape: Sequence[int]) -> Window | None:
        """The rank's part, or the whole weight, of which a part is taken later; None if another rank has all of it."""
        whole = tuple(slice(0, size) for size in shape)
        target = self._names.target(name, self.targets)
        window = whole if target is None else self._window(name, target, whole)
        if window is not None and window is not whole:
            self._cut.add(name)
        return window

    def _window(self, name: str, target: WeightTarget, whole: Sequence[slice]) -> Window | None:
        experts = self._local_experts(target) if target.stacked else range(1)
        parameter = target.parameter.format(expert=experts.start)
        if not experts or self._shards.local(parameter) is None:
            return None
        if self._shards.is_cut_by_sections(parameter):
            return whole
        rows, columns = self._shards.slices(parameter, target.part)
        if target.convert is not None or len(whole) != 2 + target.stacked:
            return whole
        if not target.stacked:
            self._shards.check_shape(parameter, target.part, [size.stop for size in whole], name)
            return (rows[0], columns) if len(rows) == 1 else whole
        # Inputs before outputs; those of gate and up alternate.
        outputs = rows[0] if len(rows) == 1 else slice(2 * rows[0].start, 2 * rows[0].stop)
        return slice(experts.start, experts.stop), columns, outputs

    @override
    def _take(self, name: str, target: WeightTarget, parts: Sequence[PackableWeight]) -> bool:
        local = self._shards.local(target.parameter)
        if local is None or self._shards.padding(target.parameter) or self._shards.is_cut_by_sections(target.parameter):
            return False
        if name not in self._cut:
            (whole,) = parts
            rows, columns = self._shards.slices(target.parameter, target.part)
            parts = [whole.part((some, columns)) for some in rows]
        taken = super()._take(name, replace(target, parameter=local), parts)
        if taken:
            self.bytes_read += sum(part.nbytes for part in parts)
        return taken

    @override
    def stacked_experts(self, name: str, target: WeightTarget) -> range:
        return self._local_experts(target) if name in self._cut else self._shards.all_experts(_layer(target))

    def _local_experts(self, target: WeightTarget) -> range:
        return self._shards.experts(_layer(target))

    @override
    def _copy(self, name: str, target: WeightTarget, tensor: Tensor) -> None:
        local = self._shards.local(target.parameter)
        if local is None:
            return
        tensor = tensor if target.convert is None else target.convert(tensor)
        if name not in self._cut:
            tensor = self._shards.cut(target.parameter, target.part, tensor, name)
        if self._shards.is_on_another_rank(target.parameter):
            tensor = torch.zeros(tensor.shape)
        else:
            self.bytes_read += tensor.nbytes
        if padding := self._shards.padding(target.parameter):
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, padding))
        super()._copy(name, replace(target, parameter=local, convert=None), tensor)


def _layer(target: WeightTarget) -> int:
    match = _LAYER.match(target.parameter)
    assert match is not None
    return int(match[1])

"""WeightShards: the part of each weight of a decoder that one rank has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.engine.models.errors import WeightMismatch
from quire.engine.models.layers.linear import Linear
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import MoE

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(.+)")
_EMBEDDING, _HEAD, _HEAD_BIAS = "embed.weight", "head.weight", "head.bias"
_WHOLE = slice(None)


class WeightShards:
    """Where a rank has the parameters of the whole decoder, and which rows and columns of them.

    The rank's decoder is compared with the whole one: dimensions that differ are cut. Names are those of the whole
    decoder's parameters, if not said otherwise. A module names in `sections` those of its own parameters of which the
    last dimension is cut, and the sizes of what lies one behind the other there.

    Attributes:
        parameters: shapes of the whole decoder's parameters.
        num_layers: number of its layers.
    """

    def __init__(self, decoder: ShardedDecoder) -> None:
        """`decoder`: the rank's."""
        whole, placement = decoder.whole, decoder.placement
        with torch.device("meta"):
            model = Decoder(whole)
        model.vision = decoder.vision  # which is whole, where a rank has it
        self.parameters: Mapping[str, Sequence[int]] = {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters()
        }
        self.num_layers = len(whole.layers)
        self._spec, self._part = whole, decoder.spec
        self._placement = placement
        self._layers = decoder.stage
        self._local: Mapping[str, Sequence[int]] = {
            name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()
        }
        self._names = _all_names(model)
        self._sections, self._local_sections = _sections(model), _sections(decoder)
        self._linears = _linears(model)
        self._local_linears = _linears(decoder)

    def local(self, name: str) -> str | None:
        """Name of a parameter in the rank's decoder; None if another rank has it."""
        names = (self._local_name(alias) for alias in self._names.get(name, (name,)))
        return next((local for local in names if local in self._local), None)

    def _local_name(self, name: str) -> str | None:
        """The name that a parameter has in the rank's decoder, if the rank has it."""
        if match := _LAYER.fullmatch(name):
            index, suffix = int(match[1]), match[2]
            if expert := _EXPERT.fullmatch(suffix):
                experts = self.experts(index)
                if int(expert[1]) not in experts:
                    return None
                suffix = f"ffn.experts.{int(expert[1]) - experts.start}.{expert[2]}"
            name = f"layers.{index - self._layers.start}.{suffix}"
        return name

    def experts(self, layer: int) -> range:
        """Indices of the experts of a layer that the rank has; empty if it does not have the layer."""
        if layer not in self._layers:
            return range(0)
        ffn = self._part.layers[layer - self._layers.start].ffn
        assert isinstance(ffn, MoE)
        return ffn.local_experts

    def all_experts(self, layer: int) -> range:
        """Indices of all experts of a layer."""
        ffn = self._spec.layers[layer].ffn
        assert isinstance(ffn, MoE)
        return range(ffn.experts)

    def is_cut_by_sections(self, name: str) -> bool:
        """Whether the rank has some elements of each section of the last dimension, for which `slices` has no form."""
        return name in self._sections

    def slices(self, name: str, part: int | None) -> tuple[list[slice], slice]:
        """Rows and columns that the rank has of a parameter, or of one projection in it. Another rank may have it all.

        Several slices of rows if `part` is None and the parameter has several projections. There are only rows to cut
        in one of one dimension.
        """
        local = self.local(name)
        assert local is not None
        if local in (_EMBEDDING, _HEAD, _HEAD_BIAS):
            begin, vocab = self._placement.tensor_rank * self._local[local][0], self._spec.vocab
            return [slice(min(begin, vocab), min(begin + self._local[local][0], vocab))], _WHOLE
        owner, local_owner = name.rpartition(".")[0], local.rpartition(".")[0]
        linear, local_linear = self._linears.get(owner), self._local_linears.get(local_owner)
        if linear is None or local_linear is None:
            return [self._slice(self.parameters[name][0], self._local[local][0], 0)], _WHOLE
        columns = self._slice(linear.size_in, local_linear.size_in, 0)
        if part is not None:
            return [self._slice(linear.parts[part], local_linear.parts[part], 0)], columns
        rows, offset = [], 0
        for whole_rows, own_rows in zip(linear.parts, local_linear.parts, strict=True):
            rows.append(self._slice(whole_rows, own_rows, offset))
            offset += whole_rows
        return rows, columns

    def _slice(self, whole: int, local_size: int, offset: int) -> slice:
        """The rank's part of a dimension; KV heads are divided into fewer pieces than there are ranks."""
        pieces = whole // local_size
        begin = self._placement.tensor_rank * pieces // self._placement.tensor_size * local_size
        return slice(offset + begin, offset + begin + local_size)

    def cut(self, name: str, part: int | None, tensor: Tensor, source: str) -> Tensor:
        """The part of a tensor that the rank has: a view, unless rows come from several projections.

        `source`: the tensor's name in the checkpoint.

        Raises:
            WeightMismatch: the tensor does not have the shape of the parameter.
        """
        self.check_shape(name, part, tensor.shape, source)
        if name in self._sections:
            return self._cut_sections(name, tensor)
        rows, columns = self.slices(name, part)
        if tensor.dim() > 1:
            tensor = tensor[:, columns]
        return tensor[rows[0]] if len(rows) == 1 else torch.cat([tensor[part_rows] for part_rows in rows])

    def _cut_sections(self, name: str, tensor: Tensor) -> Tensor:
        local = self.local(name)
        assert local is not None
        pieces, offset = [], 0
        for whole, local_size in zip(self._sections[name], self._local_sections[local], strict=True):
            pieces.append(tensor[..., self._slice(whole, local_size, offset)])
            offset += whole
        return torch.cat(pieces, -1)

    def check_shape(self, name: str, part: int | None, shape: Sequence[int], source: str) -> None:
        """Check that a tensor has the shape of a parameter, or of one projection in it; see `cut`."""
        expected = tuple(self.parameters[name])
        if part is not None:
            expected = (self._linears[name.rpartition(".")[0]].parts[part], *expected[1:])
        if tuple(shape) != expected:
            raise WeightMismatch(f"{source} has shape {tuple(shape)}, but the model's is {expected}")

    def is_on_another_rank(self, name: str) -> bool:
        """Whether a parameter is 0 here, so that it is added once: a bias of results that are summed over the ranks."""
        local = self.local(name)
        assert local is not None
        local_linear = self._local_linears.get(local.removesuffix(".bias")) if local.endswith(".bias") else None
        is_cut = local_linear is not None and local_linear.size_in != self._linears[name.removesuffix(".bias")].size_in
        return is_cut and self._placement.tensor_rank > 0

    def padding(self, name: str) -> int:
        """Rows of the rank's parameter behind those of the vocabulary."""
        local = self.local(name)
        if local is None or local not in (_EMBEDDING, _HEAD, _HEAD_BIAS):
            return 0
        (rows,), _ = self.slices(name, None)
        return self._local[local][0] - len(range(self._spec.vocab)[rows])


def _linears(model: nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def _all_names(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """All names of each parameter by the first one: layers, or embedding and head, may have it in common."""
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _sections(model: nn.Module) -> dict[str, Sequence[int]]:
    """The sections of parameters by their names."""
    return {
        f"{owner}.{name}": sizes
        for owner, module in model.named_modules()
        for name, sizes in getattr(module, "sections", {}).items()
    }

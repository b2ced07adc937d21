"""Loads the weights of a checkpoint into a model, fusing projections and converting the dtype."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.checkpoint.checkpoint import Progress, WeightTaker
from quire.engine.models.checkpoint.formats.weight_format import PackableWeight, StackedWeight, Window
from quire.engine.models.checkpoint.model_cache import NO_CACHE, ModelCache
from quire.engine.models.checkpoint.norm_gains import NormGains, normed_linears
from quire.engine.models.errors import BrokenFolder, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.linear import Linear, Packable, use_exact_inputs
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.specs.tensor_names import VISION, WeightNames, WeightTarget, rows_of_expert, unstack_expert
from quire.kernels.linear import PackedWeight, Quantization

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in checkpoints
_MAX_NAMES = 5  # in an error message
_RANDOM_STD = 0.02
_RANDOM_NUMBERS = (1 << 20) - 3  # a prime, so that rows of a weight differ
_NOT_FINITE = "has NaN or infinite values: the checkpoint is damaged"


def allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Make every parameter of a model that was built on the meta device, shared ones once.

    A layer names in `float32_parameters` those of its own that are float32, whatever the dtype of the model is.

    On devices that do not map memory at the first write, matrices have none until they are filled, and must not be
    touched: otherwise, a model that is quantized while it is loaded would need memory for all of its plain weights.
    """
    lazy = _maps_at_first_write(device)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        float32: Sequence[str] = getattr(module, "float32_parameters", ())
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=torch.float32 if name in float32 else dtype, device=device)
                if data.dim() > 1 and not lazy:
                    data.untyped_storage().resize_(0)
                made[id(parameter)] = nn.Parameter(data, requires_grad=False)
            setattr(module, name, made[id(parameter)])


def _maps_at_first_write(device: torch.device) -> bool:
    return device.type == "cpu"


def check_unpacked(name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel for a weight that is still packed."""
    if not dtype.is_floating_point:
        raise UnsupportedModel(
            f"{name} is stored as {str(dtype).removeprefix('torch.')}, but the model's config.json has no "
            "quantization_config that says how to unpack it"
        )


def check_finite(name: str, loaded: Tensor, stored: Tensor | None = None) -> None:
    """Check the values of a weight as it is loaded.

    Raises:
        BrokenFolder: there are NaN or infinite values among them.
        UnsupportedModel: the loaded dtype cannot represent them.
    """
    if _is_finite(loaded):
        return
    if stored is not None and _is_finite(stored.float()):
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise UnsupportedModel(f"{name} has values that {dtype} cannot represent; use --dtype bfloat16 or float32")
    raise BrokenFolder(f"{name} {_NOT_FINITE}")


def _is_bound(parameter: str, tensor: Tensor) -> bool:
    """Whether a tensor is a bound of values in a tower (Gemma 4), which may be infinite: then it changes none."""
    return parameter.startswith(VISION) and tensor.dim() == 0 and not tensor.isnan()


def _is_finite(tensor: Tensor) -> bool:
    # Both extremes are NaN if any value is. `isfinite().all()` takes many times as long.
    return tensor.numel() == 0 or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


class WeightFiller(WeightTaker):
    """Copy a checkpoint's tensors into a model's parameters and keep track of missing ones.

    A weight whose format a kernel reads is taken as it is stored, and packed when all parts of its parameter are there.

    Attributes:
        targets: names of the parameters that tensors may belong to.
        num_layers: number of layers, of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        names: WeightNames,
        quantization: Quantization = "none",
        *,
        tied: bool = False,
        extra_layers: int = 0,
        embeds_with_head: bool = False,
        read_elsewhere: Container[str] = (),
        exact_inputs: bool = False,
        on_packed: Callable[[str, Packable], None] | None = None,
    ) -> None:
        """Prepare to fill a model.

        Args:
            model: the model on its device, its parameters not initialized.
            names: rules for the checkpoint's tensor names.
            quantization: quantization of its linear layers.
            tied: the head shares the embedding's weight; tensors under the head's name are ignored.
            extra_layers: layers after the last that the checkpoint may hold; they are ignored.
            embeds_with_head: the checkpoint has a tied weight under the head's name only.
            read_elsewhere: tensors that are read on their way from the checkpoint, so that they are always plain.
            exact_inputs: layers do not round their inputs, whatever the format of their weights.
            on_packed: is called with each layer whose weight is complete, and its path in the model.
        """
        self._quantization = quantization
        self._read_elsewhere = read_elsewhere
        self._embeds_with_head = embeds_with_head
        self._model = model
        self._names = names
        self._tied = tied
        self._extra_layers = extra_layers
        self._parameters = dict(model.named_parameters())  # those that are not complete yet
        self._packable = _packable(model)
        self._exact_inputs = exact_inputs
        self._on_packed = on_packed
        self._paths = {} if on_packed is None else {module: path for path, module in model.named_modules()}
        self._taken: dict[str, dict[int | None, Sequence[PackableWeight]]] = {}  # parts of parameters, as stored
        pairs = [*normed_linears(model)] if quantization == "int8" else []
        self._gains = NormGains(model, pairs)
        self._changes_norms = bool(pairs)
        self._cache = NO_CACHE
        self._missing = {name: set(range(len(self._parts(name)))) for name in self._parameters}
        self.targets: Container[str] = self._missing
        self.num_layers = len(model.layers) if isinstance(model, Transformer) else 0
        self._zero_keys()
        self._extra: list[str] = []
        self._seen: list[str] = []  # names of all tensors, for errors

    def use_cache(self, cache: ModelCache) -> None:
        """Read nothing that a cache has, and give it what it has not. Norms that change with weights prevent that."""
        if not self._changes_norms:
            self._cache = cache

    @override
    def window(self, name: str, shape: Sequence[int]) -> Window | None:
        return ()

    @override
    def take(self, name: str, weight: PackableWeight | StackedWeight) -> bool:
        target = None if name in self._read_elsewhere else self._names.target(name, self.targets)
        if target is None or target.convert is not None or self._beyond(name):
            return False
        if isinstance(weight, StackedWeight):
            return target.stacked and self._take_stacked(name, target, weight)
        return not target.stacked and self._take(name, target, [weight])

    def _take_stacked(self, name: str, target: WeightTarget, weight: StackedWeight) -> bool:
        """Take the weights of experts, one by one."""
        experts, indices = weight.experts(), self.stacked_experts(name, target)
        if experts is None:
            return False
        _check_experts(name, (len(experts), *weight.shape[1:]), len(indices))
        for index, expert in zip(indices, experts, strict=True):
            parameter = target.parameter.format(expert=index)
            for part, rows in rows_of_expert(parameter):
                if not self._take(name, WeightTarget(parameter, part), [expert.part((rows, slice(None)))]):
                    return False  # which the first says, if any: their layers and formats are alike
        return True

    def _take(self, name: str, target: WeightTarget, parts: Sequence[PackableWeight]) -> bool:
        """Take a weight whose rows are those of all `parts`, if all layers that have it can multiply with it."""
        if self._is_cached(target.parameter):
            self._seen.append(name)
            self._mark_loaded(name, target)
            _check_shape(name, (sum(part.shape[0] for part in parts), parts[0].shape[1]), self._shape(target))
            self._complete_if_loaded(target.parameter)
            return True
        layers = self._packable.get(target.parameter, ())
        takes = [not layer.is_exact for layer in layers]
        if self._quantization != "none" or self._exact_inputs or not takes or not all(takes):
            return False
        parameter = self._parameters[target.parameter]
        if not all(part.can_pack(parameter.dtype, parameter.device) for part in parts):
            return False
        self._seen.append(name)
        self._mark_loaded(name, target)
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        _check_shape(name, shape, self._shape(target))
        copies = [part.copied() for part in parts]  # what is checked, as reading a part may mean to unpack it
        if not all(part.is_finite() for part in copies):
            raise BrokenFolder(f"{name} {_NOT_FINITE}")
        self._taken.setdefault(target.parameter, {})[target.part] = copies
        self._complete_if_loaded(target.parameter)
        return True

    def _is_cached(self, parameter: str) -> bool:
        """Whether the packed weight of a parameter is cached."""
        return parameter in self._packable and self._cache.has(parameter, self._parameters[parameter].shape)

    def _shape(self, target: WeightTarget) -> tuple[int, ...]:
        """The shape of a tensor that fills a parameter, or its part of one."""
        return self._rows(target)[1], *self._parameters[target.parameter].shape[1:]

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all tensors to their parameters, and pack each layer's weights once they are complete.

        Raises:
            WeightMismatch: a tensor is missing, extra, doubled or of the wrong shape.
        """
        for name, tensor in weights:
            self._put(name, tensor)
        if self._extra:
            raise WeightMismatch(f"unexpected weights in the checkpoint: {_some(self._extra)}")
        missing = [name for name, parts in self._missing.items() if parts]
        if missing:
            named = [name for parameter in missing[:_MAX_NAMES] for name in self._lacking(parameter)]
            raise WeightMismatch(f"weights missing from the checkpoint: {_some(named + missing[_MAX_NAMES:])}")

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that are not complete yet, before they are packed."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def fill_at_random(self, progress: Progress) -> None:
        """Fill all parameters with numbers as trained models have them, and pack them, as if they had been read.

        `progress`: is called with the size of each.
        """
        # NumPy's: a generator of torch needs what `import_torch` leaves out.
        drawn = np.random.default_rng(0).standard_normal(_RANDOM_NUMBERS, np.float32)
        numbers = torch.from_numpy(drawn * np.float32(_RANDOM_STD))
        for name, parameter in list(self._parameters.items()):
            data = _with_memory(parameter.data)
            if data.dim() < 2:
                data.fill_(0 if name.endswith("bias") else 1)  # gains of norms, mostly
            else:
                _repeat(numbers.roll(zlib.crc32(name.encode())), data.view(-1))
            nbytes = data.nbytes
            self._missing[name].clear()
            self._complete(name)
            progress(nbytes)

    def _lacking(self, parameter: str) -> list[str]:
        """The names that the missing tensors of a parameter have in checkpoints."""
        whole = len(self._missing[parameter]) == len(self._parts(parameter))
        parts: list[int | None] = [None] if whole else [*sorted(self._missing[parameter])]
        return [" or ".join(self._names.names_of(parameter, part, self._seen)) for part in parts]

    def _zero_keys(self) -> None:
        """Set the biases of keys that no checkpoint has."""
        for name, parameter in self._parameters.items():
            if re.fullmatch(self._names.zero_keys, name):
                queries, keys, _ = self._parts(name)
                parameter.data[queries : queries + keys] = 0
                self._missing[name].remove(1)

    def _put(self, name: str, tensor: Tensor) -> None:
        self._seen.append(name)
        if name == HEAD and self._tied:
            if not self._embeds_with_head:
                return
            name = EMBEDDING
        if self._beyond(name):
            return
        target = self._names.target(name, self.targets)
        if target is None and self._names.is_ignored(name):
            return
        check_unpacked(name, tensor.dtype)
        if target is None:
            # A shared expert of size 0 has weights, too. Tools of GPTQ write biases of zeros for layers without biases.
            if tensor.numel() and not (name.endswith(".bias") and not tensor.any()):
                self._extra.append(name)
        elif target.stacked:
            self._copy_stacked(name, target, tensor)
        else:
            self._copy(name, target, tensor)

    def _copy_stacked(self, name: str, target: WeightTarget, tensor: Tensor) -> None:
        experts = self.stacked_experts(name, target)
        _check_experts(name, tensor.shape, len(experts))
        for expert, weights in zip(experts, tensor, strict=True):
            parameter = target.parameter.format(expert=expert)
            for part, weight in unstack_expert(parameter, weights):
                self._copy(name, WeightTarget(parameter, part), weight)

    def stacked_experts(self, name: str, target: WeightTarget) -> range:
        """Indices of the experts in a stacked tensor."""
        layer = self._model.get_submodule(target.parameter.partition(".{expert}")[0])
        assert isinstance(layer, nn.ModuleList)
        return range(len(layer))

    def _copy(self, name: str, target: WeightTarget, tensor: Tensor) -> None:
        self._mark_loaded(name, target)
        if not self._is_cached(target.parameter):
            self._write(name, target, tensor if target.convert is None else target.convert(tensor))
        elif target.convert is None:
            _check_shape(name, tensor.shape, self._shape(target))
        self._complete_if_loaded(target.parameter)

    def _write(self, name: str, target: WeightTarget, tensor: Tensor) -> None:
        """Copy a tensor to its parameter, or to its part of it."""
        destination = _with_memory(self._parameters[target.parameter].data)
        if target.part is not None:
            destination = destination.narrow(0, *self._rows(target))
        _check_shape(name, tensor.shape, destination.shape)
        destination.copy_(tensor)
        if not _is_bound(target.parameter, tensor):
            check_finite(name, destination, tensor)

    def _rows(self, target: WeightTarget) -> tuple[int, int]:
        """The first row of a parameter that a tensor fills, and how many rows it fills."""
        parts = self._parts(target.parameter)
        return (0, sum(parts)) if target.part is None else (sum(parts[: target.part]), parts[target.part])

    def _parts(self, parameter: str) -> tuple[int, ...]:
        """Rows of the projections in a parameter."""
        owner = self._model.get_submodule(parameter.rpartition(".")[0])
        if isinstance(owner, Linear):
            return owner.parts
        return self._parameters[parameter].shape[:1] or (1,)  # one number alone has no rows

    def _mark_loaded(self, name: str, target: WeightTarget) -> None:
        missing = self._missing[target.parameter]
        loaded = set(missing) if target.part is None else missing & {target.part}
        if not loaded:
            raise WeightMismatch(f"{name} occurs more than once in the checkpoint")
        missing -= loaded

    def _complete_if_loaded(self, parameter: str) -> None:
        if not self._missing[parameter]:
            self._complete(parameter)

    def _complete(self, parameter: str) -> None:
        """Release a complete parameter and pack the layers that use it, which frees its memory.

        A layer does not wait for its bias: of all experts stacked in one tensor only one is not packed at a time.
        """
        is_cached = self._is_cached(parameter)
        packed = self._cache.weight(parameter) if is_cached else self._packed(parameter)
        del self._parameters[parameter]
        layers = []
        for layer in self._gains.loaded(parameter, self._packable.get(parameter, ())):
            if packed is None:
                layer.pack_weights(self._quantization)
            else:
                layer.use(packed)
            layers.append(layer)
        if self._exact_inputs:
            use_exact_inputs(layers)
        if not is_cached:
            self._cache.add(parameter, layers)
        if self._on_packed is not None:
            for layer in layers:  # once all of them are packed: they may share a weight
                self._on_packed(self._paths[layer], layer)

    def _packed(self, parameter: str) -> PackedWeight | None:
        """The weight of a complete parameter, packed as it is stored.

        Returns:
            None if that is not possible, as a part is plain or of another format; the parameter is filled then.
        """
        taken = self._taken.pop(parameter, {})
        parts = [weight for index in sorted(taken, key=lambda index: index or 0) for weight in taken[index]]
        shape, dtype, device = (getattr(self._parameters[parameter], name) for name in ("shape", "dtype", "device"))
        if parts and sum(part.shape[0] for part in parts) == shape[0] and len({type(part) for part in parts}) == 1:
            packed = parts[0].pack(parts, dtype, device)
            if packed is not None and all(layer.can_use(packed) for layer in self._packable[parameter]):
                return packed
        for index, weights in taken.items():
            tensor = torch.cat([weight.dequantize(dtype) for weight in weights])
            self._write(parameter, WeightTarget(parameter, index), tensor)
        return None

    def _beyond(self, name: str) -> bool:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return match is not None and 0 <= int(match[1]) - self.num_layers < self._extra_layers


def _check_experts(name: str, shape: Sequence[int], experts: int) -> None:
    if len(shape) < 2 or shape[0] != experts:
        raise WeightMismatch(f"{name} has shape {tuple(shape)}, but the model has {experts} experts")


def _check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise WeightMismatch(f"{name} has shape {tuple(shape)}, but the model's is {tuple(expected)}")


def _repeat(numbers: Tensor, into: Tensor) -> None:
    """Fill a row with numbers, again and again."""
    numbers = numbers.to(into.device, into.dtype)
    for part in into.split(len(numbers)):
        part.copy_(numbers[: len(part)])


def _with_memory(parameter: Tensor) -> Tensor:
    """The parameter, for which memory is allocated if it has none yet."""
    storage = parameter.untyped_storage()
    if storage.nbytes() < parameter.nbytes:
        storage.resize_(parameter.nbytes)
    return parameter


def _packable(model: nn.Module) -> dict[str, list[Packable]]:
    """The layers whose weights can be packed, by the name of the weight; a tied weight has two."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: dict[str, list[Packable]] = {}
    for layer in model.modules():
        if isinstance(layer, Packable) and layer.weight is not None:
            layers.setdefault(names[id(layer.weight)], []).append(layer)
    return layers


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")

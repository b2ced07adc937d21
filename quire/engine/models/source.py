"""WeightSource: the folder that a model is loaded from, and from which its weights are replaced while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from quire.config.options import ModelOptions
from quire.engine.models.checkpoint.checkpoint import Progress, WeightTaker, weight_files
from quire.engine.models.checkpoint.formats.weight_format import PackableWeight, StackedWeight, Window
from quire.engine.models.checkpoint.opened import is_gguf
from quire.engine.models.checkpoint.safetensors import SafetensorsFile
from quire.engine.models.checkpoint.weights import check_finite
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.loader import (
    LoadedModel,
    LoadObserver,
    LoadTarget,
    ProgressBar,
    extra_files,
    load_model,
    open_checkpoint,
)
from quire.engine.models.model_config import ModelConfig, read_config

# Fields of config.json that do not say how a model is computed: what wrote it, and defaults of generation.
_NOT_COMPARED = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
)
_MAX_NAMES = 5  # in an error message
_STILL_NEEDED = "vision"  # a part of models that is tried once all weights are read
_Header = tuple[torch.dtype, tuple[int, ...]]


class ReplacedInPart(ModelError):
    """Some weights of a model were replaced and others were not, so that it must not be used any more."""


class WeightSource:
    """A folder that a model is loaded from, and the folders that its weights are replaced from.

    Attributes:
        folder: the one that the weights in memory are from.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        options: ModelOptions,
        target: LoadTarget,
        groups: RankGroups | None = None,
        *,
        is_replaceable: bool = False,
    ) -> None:
        """Hold how a model is loaded.

        Args:
            folder: the model's directory.
            config: its config.
            options: how it is loaded.
            target: its device.
            groups: those of the rank that loads its part of the model; None: it loads all of it.
            is_replaceable: its weights may be replaced.

        Raises:
            BrokenFolder: the headers of its files cannot be read.
        """
        self.folder = folder
        self._config = config
        self._options = options
        self._target = target
        self._groups = groups
        self._is_replaceable = is_replaceable
        self._headers: Mapping[str, _Header] = {}
        self._hf_config: Mapping[str, Any] = {}
        self._parameters = _ParameterShapes()

    def load(self, bar: ProgressBar) -> LoadedModel:
        """Load the model.

        Raises:
            ModelError: it cannot be loaded.
        """
        if self._is_replaceable and not self._headers:
            if self._options.load_format == "dummy":
                raise UnsupportedModel("--weight-update-path does not work with --load-format dummy")
            self._headers = _read_headers(self.folder, self._config)
            self._hf_config = self._read_config(self.folder)
        return self._load(self.folder, bar, self._parameters if self._is_replaceable else None)

    def check(self, loaded: LoadedModel, folder: Path, progress: Progress) -> None:
        """Check everything in a folder that may keep its weights from replacing those of the model.

        Args:
            loaded: the model in memory.
            folder: the new model's directory.
            progress: is called for each tensor that was read.

        Raises:
            ModelError: they cannot; the message says why.
        """
        _check_formats(_module_of(loaded))
        try:
            self._check_folder(folder, loaded.dtype, progress)
        except OSError as error:
            raise BrokenFolder(f"{folder} cannot be read: {error}") from error
        except (RuntimeError, MemoryError) as error:  # there is no memory for a tensor
            raise ModelError(f"{folder} cannot be checked: {error}") from error

    def _check_folder(self, folder: Path, dtype: torch.dtype, progress: Progress) -> None:
        if not folder.is_dir():
            raise BrokenFolder(f"{folder} is not a directory")
        differing = _differing(self._hf_config, self._read_config(folder))
        if differing:
            raise WeightMismatch(f"config.json of {folder.name} has other values than the model's: {_some(differing)}")
        _check_headers(self._headers, _read_headers(folder, self._config), folder.name)
        with open_checkpoint(folder, self._config, self._options) as checkpoint:
            for name, tensor in checkpoint.tensors(dtype, progress, _FiniteWeights()):
                if tensor.dtype.is_floating_point:
                    check_finite(name, tensor.to(dtype), tensor)

    def replace_weights(self, loaded: LoadedModel, folder: Path, bar: ProgressBar) -> None:
        """Replace the weights of the model by those in a folder, in their places in memory.

        A weight is read, packed and moved before the next one is read, where Quire's own implementation runs the model.
        A model that transformers runs is loaded as a whole beside the one in memory.

        Raises:
            ModelError: the folder does not fit, and nothing has changed.
            ReplacedInPart: reading has failed in the middle.
        """
        model = _module_of(loaded)
        mover = _WeightMover(model, self._parameters)
        try:
            replacement = _module_of(self._load(folder, bar, mover, caches=False))
            with torch.inference_mode():
                _copy_tensors(replacement, model)
        except (ModelError, OSError, RuntimeError, MemoryError) as error:
            if mover.has_moved:
                raise ReplacedInPart(f"the weights were replaced only in part: {error}") from error
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"the weights cannot be loaded: {error}") from error
        for module in model.modules():
            for name in getattr(module, "derived_from_weights", ()):
                setattr(module, name, None)
        self.folder = folder

    def _load(
        self, folder: Path, bar: ProgressBar, observer: LoadObserver | None, *, caches: bool = True
    ) -> LoadedModel:
        """`caches`: packed weights are cached; those that replace others are hardly loaded twice."""
        options = self._options if caches else self._options.model_copy(update={"packed_weight_cache_size": 0})
        return load_model(folder, self._config, options, self._target, bar, self._groups, observer)

    def _read_config(self, folder: Path) -> Mapping[str, Any]:
        """The values of a model's config, defaults included; of a table of embeddings there is none."""
        if self._config.static is not None:
            return {}
        config = read_config(folder, self._options.hf_overrides)
        values: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        return values


def tensors_in(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module, or in an object of Quire or a container inside it, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
        return
    seen = set() if seen is None else seen
    inner = _inside(value)
    if inner and id(value) not in seen:
        seen.add(id(value))
        for name, part in inner.items():
            yield from tensors_in(part, f"{path}.{name}", seen)


def _inside(value: Any) -> Mapping[Any, Any]:
    """The parts of a value, by name or index."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple | set):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, nn.Module) or type(value).__module__.startswith("quire."):
        parts: Mapping[str, Any] = getattr(value, "__dict__", {})
        return parts
    return {}


class _ParameterShapes(LoadObserver):
    """The parameters of a model before they are packed."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}

    @override
    def on_allocated(self, model: nn.Module) -> None:
        self.shapes = _shapes(model)

    @override
    def on_packed(self, path: str, layer: Packable) -> None:
        pass


class _WeightMover(LoadObserver):
    """Move weights to the model in memory as soon as they are packed.

    Attributes:
        has_moved: some were moved.
    """

    def __init__(self, model: nn.Module, parameters: _ParameterShapes) -> None:
        self.has_moved = False
        self._model = model
        self._parameters = parameters

    @override
    def on_allocated(self, model: nn.Module) -> None:
        """Check that the model has the parameters of the one in memory: which are tied depends on their values."""
        if differing := _differing(self._parameters.shapes, _shapes(model)):
            raise WeightMismatch(
                f"the weights need another model than the one in memory, because of {_some(differing)}"
            )

    @override
    def on_packed(self, path: str, layer: Packable) -> None:
        if not isinstance(layer, Linear) or path.startswith(_STILL_NEEDED):
            return
        into = self._model.get_submodule(path)
        assert isinstance(into, Linear)
        self.has_moved = True
        with torch.inference_mode():
            for name in ("packed", "weight"):
                moved = _copy_tensors(getattr(layer, name), getattr(into, name))
                for tensor in moved:  # frees its memory, or its part of memory that several share
                    tensor.set_(tensor.new_empty(0).untyped_storage())


class _FiniteWeights(WeightTaker):
    """Checks the values of weights in formats of several tensors, of which some need not be dequantized for that."""

    @override
    def window(self, name: str, shape: Any) -> Window | None:
        return ()

    @override
    def take(self, name: str, weight: PackableWeight | StackedWeight) -> bool:
        weights = weight.experts() if isinstance(weight, StackedWeight) else [weight]
        if weights is None:
            return False
        if not all(part.is_finite() for part in weights):
            raise BrokenFolder(f"{name} has NaN or infinite values: the checkpoint is damaged")
        return True


def _copy_tensors(source: Any, target: Any) -> list[Tensor]:
    """Copy the tensors of an object to those with the same paths in another one, but for those that were moved.

    Returns:
        The tensors that were copied.

    Raises:
        WeightMismatch: the other object has no such tensor.
    """
    targets, pairs = dict(tensors_in(target)), []
    for path, tensor in tensors_in(source):
        if not tensor.numel():  # it was moved
            continue
        into = targets.get(path)
        if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
            raise WeightMismatch(f"the model in memory has no place for {path.removeprefix('.')}")
        if into is not tensor:
            pairs.append((into, tensor))
    for into, tensor in pairs:
        into.copy_(tensor)
    return [tensor for _, tensor in pairs]


def _module_of(loaded: LoadedModel) -> nn.Module:
    """The model as a module; where transformers runs it, only the modules of the object that has them."""
    model = loaded.model
    if isinstance(model, nn.Module):
        return model
    return nn.ModuleDict({name: part for name, part in vars(model).items() if isinstance(part, nn.Module)})


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _check_formats(model: nn.Module) -> None:
    """Raise UnsupportedModel for weights that cannot be replaced in their places.

    These are packed ones whose tensors are not known, as those of other packages, and scales of float8 KV caches, which
    are numbers in captured steps.
    """
    for path, layer in model.named_modules():
        numbers = {getattr(layer, name, 1.0) for name in ("key_scale", "value_scale")}
        if numbers != {1.0} or getattr(layer, "head_scales", None) is not None:
            raise UnsupportedModel("the model has scales of a float8 KV cache, which cannot be replaced")
        packed = layer.packed if isinstance(layer, Linear) else None
        if packed is not None and not any(True for _ in tensors_in(packed)):
            raise UnsupportedModel(f"weights in the format of {path} ({type(packed).__name__}) cannot be replaced")


def _read_headers(folder: Path, config: ModelConfig) -> dict[str, _Header]:
    """The dtypes and shapes of all tensors that a model is loaded from.

    Raises:
        UnsupportedModel: it is a GGUF file, whose weights cannot be replaced.
    """
    if is_gguf(config.quantization):
        raise UnsupportedModel("weights that were loaded from a GGUF file cannot be replaced while the model runs")
    files = [("", path) for path in weight_files(folder / (config.static or ""))]
    files += [(f"{name}: ", folder / name) for name in extra_files(config)]
    headers: dict[str, _Header] = {}
    for prefix, path in files:
        with SafetensorsFile(path) as file:
            headers.update((prefix + name, (file.dtype(name), file.shape(name))) for name in file.names())
    return headers


def _check_headers(before: Mapping[str, _Header], after: Mapping[str, _Header], folder: str) -> None:
    if missing := sorted(before.keys() - after.keys()):
        raise WeightMismatch(f"{folder} lacks weights of the model: {_some(missing)}")
    if extra := sorted(after.keys() - before.keys()):
        raise WeightMismatch(f"{folder} has weights that the model lacks: {_some(extra)}")
    for name, header in before.items():
        if after[name] != header:
            (dtype, shape), (new_dtype, new_shape) = header, after[name]
            raise WeightMismatch(
                f"{name} of {folder} is {_dtype(new_dtype)} {new_shape}, but that of the model is {_dtype(dtype)} "
                f"{shape}"
            )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """The names of values that differ, in objects inside too; without those that say nothing about the model."""
    names = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if name in _NOT_COMPARED or name.startswith("_") or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += _differing(old, new, f"{path}{name}.")
        else:
            names.append(path + name)
    return names


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")

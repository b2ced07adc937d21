"""Checkpoints of compressed-tensors (llm-compressor): groups of modules, each with a scheme of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from quire.engine.models.checkpoint.formats.compressed_floats import (
    FloatQuantized,
    Mxfp4PackQuantized,
    Nvfp4PackQuantized,
)
from quire.engine.models.checkpoint.formats.compressed_integers import IntQuantized, PackQuantized
from quire.engine.models.checkpoint.formats.compressed_scheme import CompressedScheme, WeightArguments, read_arguments
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import UnsupportedModel

# By the format and the type of weights of a group: makes its scheme.
SCHEMES: dict[tuple[str, str], Callable[[WeightArguments], CompressedScheme]] = {
    ("pack-quantized", "int"): PackQuantized,
    ("int-quantized", "int"): IntQuantized,
    ("naive-quantized", "int"): IntQuantized,
    ("float-quantized", "float"): FloatQuantized,
    ("naive-quantized", "float"): FloatQuantized,
    ("mxfp8-quantized", "float"): FloatQuantized,
    ("nvfp4-pack-quantized", "float"): Nvfp4PackQuantized,
    ("mxfp4-pack-quantized", "float"): Mxfp4PackQuantized,
}
_PLAIN = ("dense", "fakequant")  # formats that store weights as they are
# The tensors of a module that are read with its codes, or that are not needed: activations are not quantized with them.
_PARTS = {
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
}
_OF_CACHE = re.compile(r".*\.[kv]_proj\.output_(scale|zero_point)")  # those of keys and values, see `CacheScales`
_REGEX = "re:"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")  # modules of the class Embedding


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules with the same scheme. `targets`: names, patterns ("re:...") and classes of them."""

    name: str
    targets: Sequence[str]
    scheme: CompressedScheme


class CompressedTensors(WeightFormat):
    """Weights of which the config says in groups of modules how they are stored.

    Which modules are quantized is seen by their tensors, so that nothing depends on `ignore`: its names are those of
    modules in transformers, which are not always those in the checkpoint.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a format or an option that is not accepted.
        """
        _check_sparsity(section)
        inner = section.get("quantization_config")  # as older versions nested it
        section = {**section, **inner} if isinstance(inner, Mapping) else section
        _check_names("ignore", section.get("ignore") or [])
        self._groups = _groups(section)
        self._schemes: dict[str, CompressedScheme] = {}  # by module

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if not any(tensor == group.scheme.tensor for group in self._groups):
            return None
        if tensor == "weight" and f"{module}.weight_scale" not in stored and _is_plain(stored[name].dtype):
            return None
        scheme = self._schemes.get(module)
        if scheme is None:
            scheme = self._schemes[module] = self._scheme_of(module, tensor)
        return scheme.read(module, stored) if tensor == scheme.tensor else None

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in _PARTS and _OF_CACHE.fullmatch(name) is None

    def _scheme_of(self, module: str, tensor: str) -> CompressedScheme:
        """The scheme of a module: that of a group which names it, else which has its pattern, else its class."""
        for matches in (_is_name, _is_pattern, _is_class):
            for group in self._groups:
                if any(matches(target, module) for target in group.targets):
                    return group.scheme
        fitting = [group.scheme for group in self._groups if group.scheme.tensor == tensor]
        if len(fitting) == 1:  # names in checkpoints differ from those of modules
            return fitting[0]
        names = ", ".join(group.name for group in self._groups)
        raise UnsupportedModel(
            f"{module}.{tensor} is quantized, but none of config_groups ({names}) has a target for it"
        )


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_pattern(target: str, module: str) -> bool:
    return target.startswith(_REGEX) and re.match(target.removeprefix(_REGEX), module) is not None


def _is_class(target: str, module: str) -> bool:
    """Whether a module is of a class. Names do not show classes, but what is no embedding is a linear layer."""
    if target.startswith(_REGEX) or "." in target or not target[:1].isupper():
        return False
    return ("Embedding" in target) == (module.rpartition(".")[2] in _EMBEDDINGS)


def _groups(section: Mapping[str, Any]) -> list[_Group]:
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping):
        raise UnsupportedModel(f"quantization_config: config_groups must be an object, not {groups!r}")
    read = []
    for name, group in groups.items():
        where = f"quantization_config: config_groups.{name}"
        if not isinstance(group, Mapping):
            raise UnsupportedModel(f"{where} must be an object with weights and targets, not {group!r}")
        if (weights := group.get("weights")) is None:
            continue
        if not isinstance(weights, Mapping):
            raise UnsupportedModel(f"{where}.weights must be an object or null, not {weights!r}")
        stored_as = group.get("format") or section.get("format")
        if stored_as in _PLAIN:
            continue
        targets = group.get("targets") or []
        _check_names(f"config_groups.{name}.targets", targets)
        read.append(_Group(name, targets, _scheme(where, stored_as, read_arguments(f"{where}.weights", weights))))
    return read


def _scheme(where: str, stored_as: object, arguments: WeightArguments) -> CompressedScheme:
    make = SCHEMES.get((str(stored_as), arguments.kind))
    if make is None:
        accepted = ", ".join(f"{name} of {kind}" for name, kind in SCHEMES)
        raise UnsupportedModel(
            f"{where}: format {stored_as!r} of {arguments.kind} weights is not supported; supported are {accepted}"
        )
    try:
        return make(arguments)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{where}.weights: {error}") from error


def _check_names(where: str, names: object) -> None:
    """Check a list of names, patterns and classes of modules."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"quantization_config: {where} must be a list of texts, not {names!r}")
    for name in names:
        if name.startswith(_REGEX):
            try:
                re.compile(name.removeprefix(_REGEX))
            except re.error as error:
                raise UnsupportedModel(f"quantization_config: {where}: {name!r} is no pattern: {error}") from error


def _check_sparsity(section: Mapping[str, Any]) -> None:
    sparsity = section.get("sparsity_config")
    stored_as = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
    if stored_as not in (None, "dense"):
        raise UnsupportedModel(
            f"quantization_config: sparsity_config of format {stored_as!r} is not supported, only dense"
        )

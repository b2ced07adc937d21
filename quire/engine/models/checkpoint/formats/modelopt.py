"""Checkpoints of NVIDIA's ModelOpt and AMD's Quark: FP8, NVFP4, MXFP8 and MXFP4, which the dtypes of tensors show."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from quire.engine.models.checkpoint.formats.fp4 import MXFP4_GROUP, read_mxfp4, read_nvfp4
from quire.engine.models.checkpoint.formats.fp8 import DEFAULT_BLOCK, FP8_DTYPES, Fp8Weight
from quire.engine.models.checkpoint.formats.integer_codes import FLOATS, check_matrix, check_tensor, needed
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import UnsupportedModel
from quire.kernels.linear import Quantization

_CODES, _SCALES, _FACTOR, _INPUT_FACTORS = "weight", "weight_scale", "weight_scale_2", "pre_quant_scale"
_PARTS = frozenset({_SCALES, _FACTOR, _INPUT_FACTORS, "input_scale", "weight_zero_point", "input_zero_point"})
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_MXFP8_BLOCK = (1, 32)
_BLOCKS = "FP8_PB_WO"
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", _BLOCKS, "NVFP4", "W4A16_NVFP4", "MXFP8", "MXFP4", "MIXED_PRECISION")


class _FloatFormat(WeightFormat, ABC):
    """Weights of which a module has codes and scales. Which modules are quantized is seen by their tensors."""

    tool: ClassVar[str]

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        scales_name = f"{module}.{_SCALES}"
        dtype = stored[name].dtype
        if tensor != _CODES or (scales_name not in stored and dtype.is_floating_point and dtype.itemsize > 1):
            return None
        scales = needed(name, scales_name, stored)
        if (factors := f"{module}.{_INPUT_FACTORS}") in stored:
            raise UnsupportedModel(f"{factors}: factors of inputs are not supported with {self.tool}")
        if dtype in FP8_DTYPES:
            check_tensor(scales_name, scales, (*FLOATS, *_EXPONENTS))
            codes = check_matrix(name, stored[name], dtype)
            block = _MXFP8_BLOCK if scales.dtype in _EXPONENTS else DEFAULT_BLOCK
            return NamedWeight(name, Fp8Weight(codes, scales, block), (scales_name,))
        if dtype == torch.uint8 and scales.dtype in _EXPONENTS:
            return read_mxfp4(module, _CODES, stored)
        if dtype == torch.uint8:
            return read_nvfp4(module, _CODES, _FACTOR, stored, divides=False)
        raise UnsupportedModel(
            f"{name} is {str(dtype).removeprefix('torch.')}, which is not supported with {self.tool}; supported are "
            "weights of FP8 and FP4"
        )

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in _PARTS


class ModelOpt(_FloatFormat):
    """Weights as ModelOpt exports them."""

    tool = "ModelOpt"

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`, or `quantization` of hf_quant_config.json.

        Raises:
            UnsupportedModel: it has an algorithm that is not accepted.
        """
        inner = section.get("quantization")
        section = {**section, **inner} if isinstance(inner, Mapping) else section
        self._has_blocks = False
        for where, algorithm in _algorithms(section):
            name = str(algorithm).upper()
            if name not in _ALGORITHMS:
                raise UnsupportedModel(
                    f"quantization_config: {where} {algorithm!r} of ModelOpt is not supported; supported are "
                    f"{', '.join(_ALGORITHMS)}"
                )
            self._has_blocks |= name == _BLOCKS

    @override
    def requantized(self, quantization: Quantization) -> Quantization:
        return "fp8_blocks" if self._has_blocks and quantization == "fp8" else quantization


def _algorithms(section: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The algorithms of weights, and where the config names them."""
    if (algorithm := section.get("quant_algo")) is not None:  # else only the KV cache is quantized
        yield "quant_algo", algorithm
    layers = section.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        raise UnsupportedModel(f"quantization_config: quantized_layers must be an object, not {layers!r}")
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            raise UnsupportedModel(f"quantization_config: quantized_layers[{name!r}] must be an object, not {layer!r}")
        yield f"quantized_layers[{name!r}].quant_algo", layer.get("quant_algo")


class Quark(_FloatFormat):
    """Weights as Quark exports them: FP8 per tensor or row, and MXFP4."""

    tool = "Quark"

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a dtype or a scheme that is not accepted.
        """
        export = section.get("export") or {}
        packing = export.get("pack_method") if isinstance(export, Mapping) else export
        if packing not in (None, "order", "reorder"):
            raise UnsupportedModel(
                f"quantization_config: pack_method {packing!r} of Quark is not supported; supported are order and "
                "reorder"
            )
        _check_quark("global_quant_config", section.get("global_quant_config"))
        for kind in ("layer_quant_config", "layer_type_quant_config"):
            configs = section.get(kind) or {}
            if not isinstance(configs, Mapping):
                raise UnsupportedModel(f"quantization_config: {kind} must be an object, not {configs!r}")
            for name, config in configs.items():
                _check_quark(f"{kind}[{name!r}]", config)


def _check_quark(where: str, config: object) -> None:
    """Check how weights are quantized, in one part of a config."""
    if config is None:
        return
    weights = config.get("weight") if isinstance(config, Mapping) else config
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise UnsupportedModel(f"quantization_config: {where}.weight must be an object or null, not {weights!r}")
    dtype, scheme, group = (weights.get(name) for name in ("dtype", "qscheme", "group_size"))
    if dtype in ("fp8_e4m3", "fp8_e5m2") and scheme in ("per_tensor", "per_channel"):
        return
    if dtype == "fp4" and scheme == "per_group" and group == MXFP4_GROUP and weights.get("scale_format") == "e8m0":
        return
    raise UnsupportedModel(
        f"quantization_config: {where}: weights of {dtype!r} {scheme!r} (group_size {group!r}) of Quark are not "
        "supported; supported are fp8_e4m3 and fp8_e5m2 per_tensor and per_channel, and fp4 per_group of "
        f"{MXFP4_GROUP} with scale_format e8m0"
    )

"""Reads the section of a config that says how the weights of the checkpoint are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder

_SECTIONS = ("quantization_config", "compression_config")  # the second: of older versions of compressed-tensors
# What tools wrote beside a config without a section.
_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
# Other names of methods in checkpoints.
_ALIASES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "auto_gptq": "gptq",
    "auto_awq": "awq",
    "compressed_tensors": "compressed-tensors",
}
# Values of vLLM's --quantization for checkpoints of a method, beside its name.
_VLLM_NAMES = {
    "gptq": ("auto_gptq", "gptq_marlin", "gptq_bitblas", "moe_wna16"),
    "awq": ("auto_awq", "awq_marlin", "moe_wna16"),
    "auto-round": ("inc", "auto_round", "intel/auto-round"),
    "compressed-tensors": ("compressed_tensors",),
}


def quantization_section(config: Any, folder: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of a model's config, with the method as text; None if there is none.

    `quire.engine.models.checkpoint.formats` makes a format of it, or refuses it, when weights are read.

    Args:
        config: of the model.
        folder: the model's directory, where older tools wrote a file instead of the section.

    Raises:
        BrokenFolder: such a file cannot be read.
    """
    section = next((section for name in _SECTIONS if (section := getattr(config, name, None)) is not None), None)
    if section is None:
        return _section_in_file(folder)
    values = section if isinstance(section, Mapping) else getattr(section, "__dict__", {})
    method = values.get("quant_method", "compressed-tensors" if "config_groups" in values else None)
    return _named(str(getattr(method, "value", method)), values)


def vllm_names(section: Mapping[str, Any]) -> frozenset[str]:
    """The values of vLLM's --quantization that describe a checkpoint with this section."""
    method = section["quant_method"]
    return frozenset({method, *_VLLM_NAMES.get(method, ())})


def _section_in_file(folder: Path) -> Mapping[str, Any] | None:
    for name in _FILES:
        values = read_json(folder / name, BrokenFolder)
        if values:
            method = values.get("quant_method") or ("awq" if "w_bit" in values or "version" in values else "gptq")
            return _named(str(method), values)
    return None


def _named(method: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**values, "quant_method": _ALIASES.get(method, method)}

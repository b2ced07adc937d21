"""Reads the section of a config that says how the weights of the checkpoint are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from quire.config.options import ModelOptions, OnlineQuantization
from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_SECTIONS = ("quantization_config", "compression_config")  # the second: of older versions of compressed-tensors
# What tools wrote beside a config without a section.
_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
# Other names of methods in checkpoints.
_ALIASES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "auto_gptq": "gptq",
    "auto_awq": "awq",
    "compressed_tensors": "compressed-tensors",
    **dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
}
# Values of vLLM's --quantization for checkpoints of a method, beside its name.
_VLLM_NAMES = {
    "gptq": ("auto_gptq", "gptq_marlin", "gptq_bitblas", "moe_wna16"),
    "awq": ("auto_awq", "awq_marlin", "moe_wna16"),
    "auto-round": ("inc", "auto_round"),
    "compressed-tensors": ("compressed_tensors",),
    "modelopt": ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    "mxfp4": ("gpt_oss_mxfp4",),
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


def cache_scheme(section: Mapping[str, Any] | None) -> str | None:
    """The format of the KV cache that a checkpoint was made for: "fp8", or the name of another one; None: any."""
    if section is None:
        return None
    inner = section.get("quantization")
    section = {**section, **inner} if isinstance(inner, Mapping) else section
    if algorithm := section.get("kv_cache_quant_algo"):  # of ModelOpt
        return str(algorithm).lower()
    scheme = section.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    kind, bits = str(scheme.get("type", "int")), scheme.get("num_bits", 8)
    return "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"


def vllm_names(section: Mapping[str, Any]) -> frozenset[str]:
    """The values of vLLM's --quantization that describe a checkpoint with this section."""
    method = section["quant_method"]
    return frozenset({method, *_VLLM_NAMES.get(method, ())})


def chosen_quantization(options: ModelOptions, section: Mapping[str, Any] | None, *, has_float8: bool) -> ModelOptions:
    """The options with the quantization that weights get while they are loaded.

    Args:
        options: how the model is loaded. Its quantization may name the format that the checkpoint has already.
        section: that of the model's config; None: there is none.
        has_float8: the device multiplies float8 numbers, so that fp8 means to do so.

    Raises:
        UnsupportedModel: the checkpoint has another format.
    """
    named = options.quantization
    accepted = frozenset[str]() if section is None else vllm_names(section)
    if options.online_quantization == named and not (named == "fp8" and named in accepted and not has_float8):
        return options
    if named not in accepted:
        has = "it is not quantized" if section is None else f"its quantization is {section['quant_method']}"
        names = ", ".join((*sorted(accepted), *get_args(OnlineQuantization)))
        raise UnsupportedModel(f"--quantization {named} does not describe the checkpoint: {has}; accepted are {names}")
    return options.model_copy(update={"quantization": "none"})


def _section_in_file(folder: Path) -> Mapping[str, Any] | None:
    for name in _FILES:
        values = read_json(folder / name, BrokenFolder)
        if values:
            return _named(str(values.get("quant_method") or _method_of(values)), values)
    return None


def _method_of(values: Mapping[str, Any]) -> str:
    """The method of a file that does not name it."""
    if "quant_algo" in values or isinstance(values.get("quantization"), Mapping):
        return "modelopt"
    return "awq" if "w_bit" in values or "version" in values else "gptq"


def _named(method: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**values, "quant_method": _ALIASES.get(method, method)}

"""`quire config`: what the settings of a server resolve to, and what they make of its models, without loading any."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.app.models import Lookup, NotHere, find_folder
from quire.config.command import ConfigError
from quire.config.commands import Config
from quire.config.options import ModelOptions
from quire.config.resolved import as_json, as_text, as_toml, resolved_settings
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config.quantization import chosen_quantization
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from quire.engine.execution.devices.device import Device


def run(settings: Config) -> int:
    """Print the settings; returns the exit status."""
    resolved = resolved_settings(settings, os.environ)
    models = _models(settings)
    if settings.format == "json":
        notes = [*settings.notes, *settings.warnings]
        print(json.dumps({"settings": as_json(resolved), "models": models, "notes": notes}, indent=2))
        return 0
    mark = "# " if settings.format == "toml" else ""
    lines = as_toml(resolved) if settings.format == "toml" else as_text(resolved)
    print("\n".join(lines))
    for name, facts in models.items():
        print(f"\n{mark}{name}:", *(f"{mark}  {fact}: {value}" for fact, value in facts.items()), sep="\n")
    for note in (*settings.notes, *settings.warnings):
        print(f"{mark}note: {note}")
    return 0


def _models(settings: Config) -> dict[str, Mapping[str, Any]]:
    """What the settings make of each model that is named, by its name."""
    lookup = Lookup.of(ModelOptions.of(settings), is_offline=True)
    folders = {model: _local_folder(model, lookup) for model in settings.model}
    local = [folder for folder in folders.values() if isinstance(folder, Path)]
    pooling = PoolingOptions(settings.task, settings.convert, settings.pooler_config)
    if not local:
        return {model: {"problem": problem} for model, problem in folders.items()}
    configs = ConfigReader()
    configs.start(
        local, ReadingOptions(settings.model_impl, settings.hf_overrides, pooling, settings.language_model_only)
    )
    return {
        model: _facts(folder, configs, settings) if isinstance(folder, Path) else {"problem": folder}
        for model, folder in folders.items()
    }


def _local_folder(model: str, lookup: Lookup) -> Path | str:
    """The directory of a model, or why there is none."""
    try:
        return find_folder(model, lookup)
    except NotHere:
        return "it is not on this machine yet"
    except ConfigError as error:
        return str(error)


def _facts(folder: Path, configs: ConfigReader, settings: Config) -> dict[str, Any]:
    try:
        return _readable_facts(folder, configs.next(), settings)
    except ModelError as error:
        return {"problem": str(error)}


def _readable_facts(folder: Path, config: ModelConfig, settings: Config) -> dict[str, Any]:
    """What a model becomes with these settings.

    Raises:
        ModelError: it could not be loaded.
    """
    from quire.engine.execution.devices.select import find_device  # noqa: PLC0415 imports torch

    device = find_device(settings.device)
    options = ModelOptions.of(settings)
    return {
        "folder": str(folder),
        "architecture": config.model_type,
        "implementation": "transformers" if config.spec is None else "quire",
        "device": f"{device.name}, {device.description}",
        **_weights(folder, config, options, device),
        **_context(config, settings.max_model_len),
    }


def _weights(folder: Path, config: ModelConfig, options: ModelOptions, device: Device) -> dict[str, Any]:
    from quire.engine.models.loader import computed_dtype, open_checkpoint  # noqa: PLC0415 imports torch
    from quire.kernels.gpu import computes_float8  # noqa: PLC0415 like it

    has_float8 = computes_float8(device.torch_device)
    options = chosen_quantization(options, config.quantization, has_float8=has_float8)
    stored = {}
    with open_checkpoint(folder, config, options) as checkpoint:
        dtype = computed_dtype(options, checkpoint, device, exact=config.static is not None)
        if options.load_format != "dummy":
            stored = {
                "stored dtype": str(checkpoint.dtype()).removeprefix("torch."),
                "stored bytes": checkpoint.total_bytes,
            }
    method = None if config.quantization is None else config.quantization["quant_method"]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": (method or "none") if options.quantization == "none" else options.quantization,
        **stored,
    }


def _context(config: ModelConfig, requested: int | None) -> dict[str, Any]:
    trained = config.sizes.longest
    if trained is None:
        return {}
    if requested is not None and requested > trained:
        return {"max_model_len": f"{requested} is more than the {trained} tokens that the model supports"}
    return {"max_model_len": f"{requested or trained}, or less if the KV cache holds fewer tokens"}

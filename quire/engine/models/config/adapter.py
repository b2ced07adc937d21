"""Reads the config of an adapter (LoRA) of a language model. Without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Options of PEFT under which an adapter is more, or something else, than products of two weights.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "fan_in_fan_out": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A low-rank adapter (LoRA) in PEFT's format.

    Attributes:
        file: the file of its weights, relative to the model's folder; None: they are in the checkpoint, under `name`.
        name: name of the adapter.
        alpha: divided by the rank, or by its square root if `stabilized`, it is the scale of the product.
        alphas: patterns of the ends of names of modules, which have another one.
    """

    file: str | None
    name: str
    alpha: float
    alphas: Mapping[str, float] = field(default_factory=dict)
    stabilized: bool = False

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product of a module's weights."""
        pattern = next((key for key in self.alphas if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (math.sqrt(rank) if self.stabilized else rank)


def read_adapter(folder: Path, inner: str = "") -> AdapterConfig | None:
    """Read the config of an adapter in PEFT's format.

    Args:
        folder: the model's directory.
        inner: folder of the adapter, relative to the model's.

    Returns:
        The config; None if the folder has none.

    Raises:
        BrokenFolder: a value in it cannot be used.
        UnsupportedModel: the adapter is not one of low rank, or it changes more than that.
    """
    path = folder / inner / _CONFIG
    if not path.exists():
        return None
    config = read_json(path, BrokenFolder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{path}: peft_type {kind!r} is not supported; supported is 'LORA'")
    for name, accepted in _UNSUPPORTED.items():
        value = config.get(name)
        if value is not None and value not in accepted:
            raise UnsupportedModel(f"{path}: {name} {value!r} is not supported; supported is {accepted[0]!r}")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise BrokenFolder(f"{path}: alpha_pattern must be an object, not {alphas!r}")
    return AdapterConfig(
        file=f"{inner}/{_WEIGHTS}" if inner else _WEIGHTS,
        name="default",
        alpha=_alpha(config.get("lora_alpha", 8), path),
        alphas={_pattern(key, path): _alpha(value, path) for key, value in alphas.items()},
        stabilized=config.get("use_rslora") is True,
    )


def _alpha(value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BrokenFolder(f"{path}: lora_alpha must be a number, not {value!r}")
    return float(value)


def _pattern(text: str, path: Path) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise BrokenFolder(f"{path}: alpha_pattern has {text!r}, which is not a regular expression: {error}") from error
    return text

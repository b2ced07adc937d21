"""Reads the section of a config that says how the weights of the checkpoint are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quantization_section(config: Any) -> Mapping[str, Any] | None:
    """The `quantization_config` of a model's config, with the method as text; None if there is none.

    `quire.engine.models.checkpoint.formats` makes a format of it, or refuses it, when weights are read.
    """
    section = getattr(config, "quantization_config", None)
    if section is None:
        return None
    values = section if isinstance(section, Mapping) else getattr(section, "__dict__", {})
    method = values.get("quant_method")
    return {**values, "quant_method": str(getattr(method, "value", method))}

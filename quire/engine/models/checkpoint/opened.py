"""Opens the checkpoint in a folder, whatever the format of its files is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.models.checkpoint.checkpoint import Checkpoint, SafetensorsCheckpoint
from quire.engine.models.checkpoint.gguf.checkpoint import GgufCheckpoint
from quire.engine.models.checkpoint.gguf.folder import METHOD
from quire.engine.models.checkpoint.safetensors import PlainName


def checkpoint_in(folder: Path, quantization: Mapping[str, Any] | None, plain_name: PlainName = str) -> Checkpoint:
    """The checkpoint in a folder.

    Args:
        folder: the model's directory.
        quantization: section of the config.
        plain_name: see `SafetensorsFile`.

    Raises:
        ModelError: its files cannot be read.
    """
    if is_gguf(quantization):
        return GgufCheckpoint(folder, plain_name)
    return SafetensorsCheckpoint(folder, quantization, plain_name)


def is_gguf(quantization: Mapping[str, Any] | None) -> bool:
    """Whether the config is one of a GGUF file, see `gguf.folder`."""
    return quantization is not None and quantization.get("quant_method") == METHOD

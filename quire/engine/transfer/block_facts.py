"""What the bytes of KV blocks depend on, as two engines compare it before they send any."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from quire.engine.client.facts import Facts

WEIGHTS, CONFIG = "digest of the weights", "digest of the configuration"
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PIECE = 4 << 20  # bytes that are read at a time


def file_facts(folder: Path) -> Facts:
    """Return the digests of a model's files: of their content alone, so that they are equal on all machines.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {
        WEIGHTS: _digest(path for path in files if path.suffix in _WEIGHT_FILES),
        CONFIG: _digest(path for path in files if path.name == "config.json" or "quant" in path.name),
    }


def _digest(files: Iterable[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"\0{path.name} {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()

"""The safetensors files of a model folder as one stream of plain tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.models.errors import BrokenFolder
from quire.engine.models.quantized import is_scale, packing_of
from quire.engine.models.safetensors import SafetensorsFile

_INDEX = "model.safetensors.index.json"
Progress = Callable[[int], None]  # told the bytes of each tensor that was read


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, from its index if it has one.

    Raises:
        BrokenFolder: there are none, or one that the index names is missing.
    """
    index = folder / _INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BrokenFolder(f"{folder} holds no .safetensors files")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BrokenFolder(f"{_INDEX} cannot be read: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BrokenFolder(f"{_INDEX} names files that {folder} lacks: {', '.join(missing)}")
    return [folder / name for name in names]


class Checkpoint:
    """All tensors of a folder. Use as a context manager; tensors handed out are valid until the next one."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._files = [self._stack.enter_context(SafetensorsFile(path)) for path in weight_files(folder)]
        self._home = {name: file for file in self._files for name in file.names()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._home.clear()
        self._stack.close()
        self._files.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.size(name) for name, file in self._home.items())

    def dtype(self) -> torch.dtype:
        """The number format that most bytes of floating tensors have."""
        sizes: dict[torch.dtype, int] = {}
        for name, file in self._home.items():
            if (dtype := file.dtype(name)).is_floating_point and dtype.itemsize > 1:
                sizes[dtype] = sizes.get(dtype, 0) + file.size(name)
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)

    def tensors(self, dtype: torch.dtype, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in file order. Packed ones come unpacked as `dtype`, others as they are stored."""
        for file in self._files:
            for name in file.names():
                if not is_scale(name):
                    yield self._plain(file, name, dtype)
                    file.release(name)
                progress(file.size(name))

    def _plain(self, file: SafetensorsFile, name: str, dtype: torch.dtype) -> tuple[str, Tensor]:
        plain, scales, unpack = packing_of(name)
        home = self._home.get(scales)
        if home is None:
            return name, file.tensor(name)
        return plain, unpack(file.tensor(name), home.tensor(scales), dtype)

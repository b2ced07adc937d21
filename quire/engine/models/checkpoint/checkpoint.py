"""Reads the safetensors files of a model folder as one stream of unpacked tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.models.checkpoint.quantized import (
    FP8_DTYPES,
    Window,
    is_scale,
    mxfp4_shape,
    scales_of,
    unpack_fp8,
    unpack_mxfp4,
)
from quire.engine.models.checkpoint.safetensors import PlainName, SafetensorsFile
from quire.engine.models.checkpoint.weight_files import complaint_about, readable_weights
from quire.engine.models.config.fp8 import Fp8Scales
from quire.engine.models.errors import BrokenFolder

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
Progress = Callable[[int], None]  # called with the size in bytes of each tensor that was read
# Given name and shape of a tensor: the part of it that is wanted; None: nothing of it.
WindowOf = Callable[[str, Sequence[int]], Window | None]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, as listed in its index file if there is one.

    Raises:
        BrokenFolder: there are no weight files, or one that the index lists is missing.
    """
    index = folder / _INDEX
    try:
        if not index.exists():
            return _files_without_index(folder)
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BrokenFolder(f"{_INDEX} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise BrokenFolder(f"{_INDEX} cannot be used: its weight_map must map tensors to names of files")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BrokenFolder(f"{_INDEX} lists files that are missing in {folder}: {', '.join(missing)}")
    return [folder / name for name in names]


def _files_without_index(folder: Path) -> list[Path]:
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    names = sorted(path.name for path in folder.iterdir())
    if readable := readable_weights(names):
        return [folder / name for name in readable]
    raise BrokenFolder(f"{folder} {complaint_about(names)}")


class Checkpoint:
    """All tensors of a folder; a context manager. A tensor is valid until the next one is read."""

    def __init__(self, folder: Path, fp8: Fp8Scales | None = None, plain_name: PlainName = str) -> None:
        """Open the files.

        Args:
            folder: the model's directory.
            fp8: how FP8 weights are scaled, if the config says that they are.
            plain_name: see `SafetensorsFile`.
        """
        self._fp8 = fp8
        self._stack = ExitStack()
        self._files = [self._stack.enter_context(SafetensorsFile(path, plain_name)) for path in weight_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.names()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()
        self._files.clear()

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self._file_of)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(file.size(name) for name, file in self._file_of.items())

    def dtype(self) -> torch.dtype:
        """The dtype of at least 16 bits that most bytes of the floating-point tensors have."""
        sizes: dict[torch.dtype, int] = {}
        for name, file in self._file_of.items():
            if (dtype := file.dtype(name)).is_floating_point and dtype.itemsize > 1:
                sizes[dtype] = sizes.get(dtype, 0) + file.size(name)
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)

    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        return self._file_of[name].dtype(name)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values, as they are stored."""
        files = self._file_of[one], self._file_of[other]
        first, second = (file.tensor(name) for file, name in zip(files, (one, other), strict=True))
        same = first.dtype == second.dtype and torch.equal(first, second)
        for file, name in zip(files, (one, other), strict=True):
            file.release(name)
        return same

    def tensors(
        self, dtype: torch.dtype, progress: Progress, window_of: WindowOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors in file order. Packed tensors are unpacked to `dtype`, others keep their dtype.

        Of a packed tensor only the part that `window_of` gives is unpacked. Others are views of the files, of which
        nothing is read before it is used.
        """
        for file in self._files:
            for name in file.names():
                if not is_scale(name):
                    if (found := self._unpacked(file, name, dtype, window_of)) is not None:
                        yield found
                    file.release(name)
                progress(file.size(name))

    def _unpacked(
        self, file: SafetensorsFile, name: str, dtype: torch.dtype, window_of: WindowOf | None
    ) -> tuple[str, Tensor] | None:
        """Name and tensor; None if nothing of it is wanted."""
        plain, candidates = scales_of(name)
        scales = next((one for one in candidates if one in self._file_of), None)
        tensor = file.tensor(name)
        if scales is None:
            if self._fp8 is not None and tensor.dtype in FP8_DTYPES:
                raise BrokenFolder(f"{file.path.name}: {name} is {_name(tensor.dtype)}, but {candidates[0]} is missing")
            return name, tensor
        factors = self._file_of[scales].tensor(scales)
        try:
            window = None
            if window_of is not None:
                window = window_of(plain, tensor.shape if plain == name else mxfp4_shape(tensor))
                if window is None:
                    return None
            if plain != name:
                return plain, unpack_mxfp4(tensor, factors, dtype, window)
            return name, unpack_fp8(tensor, factors, dtype, self._fp8 or Fp8Scales(), window)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # shapes or dtypes that do not match
            raise BrokenFolder(f"{file.path.name}: {name} cannot be dequantized with {scales}: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Reads the safetensors files of a model folder as one stream of unpacked tensors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats import formats_of
from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    PackableWeight,
    StackedWeight,
    StoredTensors,
    Window,
)
from quire.engine.models.checkpoint.safetensors import PlainName, SafetensorsFile
from quire.engine.models.checkpoint.weight_files import INDEX, WHOLE, complaint_about, readable_weights
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.linear import Quantization

Progress = Callable[[int], None]  # called with the size in bytes of each tensor that was read


class WeightTaker(Protocol):
    """What is wanted of weights that are stored as several tensors."""

    def window(self, name: str, shape: Sequence[int]) -> Window | None:
        """The part of a weight that is wanted; None: nothing of it."""

    def take(self, name: str, weight: PackableWeight | StackedWeight) -> bool:
        """Take the wanted part of a weight as it is stored; False: it is wanted among the tensors, dequantized."""


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, as listed in its index file if there is one.

    Raises:
        BrokenFolder: there are no weight files, or one that the index lists is missing.
    """
    index = folder / INDEX
    try:
        if not index.exists():
            return _files_without_index(folder)
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BrokenFolder(f"{INDEX} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise BrokenFolder(f"{INDEX} cannot be used: its weight_map must map tensors to names of files")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BrokenFolder(f"{INDEX} lists files that are missing in {folder}: {', '.join(missing)}")
    return [folder / name for name in names]


def _files_without_index(folder: Path) -> list[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    names = sorted(path.name for path in folder.iterdir())
    if readable := readable_weights(names):
        return [folder / name for name in readable]
    raise BrokenFolder(f"{folder} {complaint_about(names)}")


class Checkpoint(ABC):
    """All tensors of a folder; a context manager. A tensor is valid until the next one is read."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Close the files."""

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """Number of tensors."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""

    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of at least 16 bits that most bytes of the floating-point tensors have, scales left out."""

    @abstractmethod
    def names(self) -> Set[str]:
        """Names of all tensors."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""

    @abstractmethod
    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values, as they are stored."""

    def requantized(self, quantization: Quantization) -> Quantization:
        """The quantization of weights that loses least, if they are quantized as asked for; see `WeightFormat`."""
        return quantization

    @abstractmethod
    def tensors(
        self, dtype: torch.dtype, progress: Progress, taker: WeightTaker | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors in file order, as they are stored. Of weights in another format, `dtype` is yielded.

        Plain tensors are views of the files, of which nothing is read before it is used. Of a weight in another format
        only the part is dequantized that `taker` wants and does not take.
        """


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of safetensors files."""

    def __init__(
        self, folder: Path, quantization: Mapping[str, Any] | None = None, plain_name: PlainName = str
    ) -> None:
        """Open the files.

        Args:
            folder: the model's directory.
            quantization: section of the config, see `formats_of`.
            plain_name: see `SafetensorsFile`.
        """
        self._formats = formats_of(quantization)
        self._stack = ExitStack()
        self._files = [self._stack.enter_context(SafetensorsFile(path, plain_name)) for path in weight_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.names()}
        self._stored: StoredTensors = _StoredTensors(self._file_of)
        metadata = {name: text for file in self._files for name, text in file.metadata.items()}
        for weight_format in self._formats:
            weight_format.use_metadata(metadata)

    @override
    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()
        self._files.clear()

    @property
    @override
    def num_tensors(self) -> int:
        return len(self._file_of)

    @property
    @override
    def total_bytes(self) -> int:
        return sum(file.size(name) for name, file in self._file_of.items())

    @override
    def dtype(self) -> torch.dtype:
        sizes: dict[torch.dtype, int] = {}
        for name, file in self._file_of.items():
            plain = not any(weight_format.is_part(name, self._stored) for weight_format in self._formats)
            if plain and (dtype := file.dtype(name)).is_floating_point and dtype.itemsize > 1:
                sizes[dtype] = sizes.get(dtype, 0) + file.size(name)
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)

    @override
    def names(self) -> Set[str]:
        return self._file_of.keys()

    @override
    def dtype_of(self, name: str) -> torch.dtype:
        return self._file_of[name].dtype(name)

    @override
    def equal(self, first: str, second: str) -> bool:
        names = first, second
        files = self._file_of[first], self._file_of[second]
        left, right = (file.tensor(name) for file, name in zip(files, names, strict=True))
        same = left.dtype == right.dtype and torch.equal(left, right)
        for file, name in zip(files, names, strict=True):
            file.release(name)
        return same

    @override
    def requantized(self, quantization: Quantization) -> Quantization:
        return self._formats[0].requantized(quantization)

    @override
    def tensors(
        self, dtype: torch.dtype, progress: Progress, taker: WeightTaker | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            for name in file.names():
                if not any(weight_format.is_part(name, self._stored) for weight_format in self._formats):
                    weight = self._read(file, name)
                    if weight is None:
                        yield name, file.tensor(name)
                    elif (tensor := wanted(file.path.name, name, weight, dtype, taker)) is not None:
                        yield weight.name, tensor
                file.release(name)
                progress(file.size(name))

    def _read(self, file: SafetensorsFile, name: str) -> NamedWeight | None:
        """The weight whose first tensor this is; None if it is a plain tensor."""
        try:
            return next(filter(None, (weight_format.read(name, self._stored) for weight_format in self._formats)), None)
        except BrokenFolder as error:
            raise BrokenFolder(f"{file.path.name}: {error}") from error
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{file.path.name}: {error}") from error


def wanted(file: str, first: str, named: NamedWeight, dtype: torch.dtype, taker: WeightTaker | None) -> Tensor | None:
    """The wanted part of a weight, dequantized; None if nothing of it is wanted, or if it was taken.

    `file`, `first`: names of the file and of the weight's first tensor, for errors.
    """
    name, weight, _ = named
    with _named_errors(file, first, named):
        window = () if taker is None else taker.window(name, weight.shape)
        if window is None:
            return None
        weight = weight.part(window)
    if taker is not None and isinstance(weight, PackableWeight | StackedWeight) and taker.take(name, weight):
        return None
    with _named_errors(file, first, named):
        return weight.dequantize(dtype)


@contextmanager
def _named_errors(file: str, first: str, named: NamedWeight) -> Iterator[None]:
    """Say in errors of a weight which tensors cannot be used."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: {named.name}: {error}") from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # shapes or dtypes that do not match
        others = f" with {' and '.join(named.tensors)}" if named.tensors else ""
        raise BrokenFolder(f"{file}: {first} cannot be dequantized{others}: {error}") from error


class _StoredTensors(Mapping[str, Tensor]):
    """Views of all tensors of some files."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

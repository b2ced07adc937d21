"""GgufFacts: what a GGUF file says about its model, every value checked for its kind.

Without torch: a server reads the facts of its models before it imports torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from quire.engine.models.checkpoint.gguf.container import GgufFile
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

T = TypeVar("T")
_SHOWN = 40  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Metadata, and the names and shapes of tensors.

    Keys that begin with a dot are those of the architecture: ".block_count" is llama.block_count, for example.

    Attributes:
        file: its name, for errors.
        metadata: values by key.
        shapes: of the tensors by name, rows before columns.
        values: reads the numbers of a small tensor that is not quantized.
    """

    file: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[str], Sequence[float]]

    @property
    def architecture(self) -> str:
        """What the file calls the kind of its model."""
        return self.text("general.architecture")

    @property
    def head_dim(self) -> int:
        """Elements of a head.

        Raises:
            BrokenFolder: there are no heads.
        """
        heads = self.integer(".attention.head_count")
        if heads < 1:
            raise BrokenFolder(f"{self.file}: {self.architecture}.attention.head_count must be above 0, not {heads}")
        return self.optional_integer(".attention.key_length") or self.integer(".embedding_length") // heads

    def integer(self, key: str) -> int:
        """The integer under a key.

        Raises:
            BrokenFolder: it is missing or of another kind.
            UnsupportedModel: there is one for each layer, and they differ.
        """
        return self._needed(key, self.optional_integer(key))

    def optional_integer(self, key: str) -> int | None:
        """The integer under a key; None if the file has none. Raises as `integer` does."""
        value = self._value(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return self._same(key, value)
        if value is not None and type(value) is not int:
            raise self._wrong(key, value, "an integer")
        return value

    def by_layer(self, key: str, layers: int) -> list[int]:
        """The integer under a key for each layer: the file has one for all of them, or an array.

        Raises:
            BrokenFolder: it is missing or of another kind, or there are fewer numbers than layers.
        """
        value = self._needed(key, self._value(key))
        values = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value] * layers
        if any(type(number) is not int or number < 0 for number in values):
            raise self._wrong(key, value, "an integer above 0, or one for each layer")
        if len(values) < layers:
            raise BrokenFolder(f"{self.file}: {self._full(key)} has {len(values)} values for {layers} layers")
        return values[:layers]

    def numbers_by_layer(self, key: str, layers: int) -> list[float]:
        """The number under a key for each layer; raises as `by_layer` does."""
        value = self._needed(key, self._value(key))
        values = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value] * layers
        if any(type(number) not in (int, float) for number in values):
            raise self._wrong(key, value, "a number, or one for each layer")
        if len(values) < layers:
            raise BrokenFolder(f"{self.file}: {self._full(key)} has {len(values)} values for {layers} layers")
        return [float(number) for number in values[:layers]]

    def largest(self, key: str) -> int:
        """The integer under a key, or the largest of those of layers; 0 if the file has none."""
        value = self._value(key)
        return max(value, default=0) if isinstance(value, list | tuple) else self.optional_integer(key) or 0

    def number(self, key: str) -> float:
        """The number under a key; raises BrokenFolder if there is none."""
        return self._needed(key, self.optional_number(key))

    def optional_number(self, key: str) -> float | None:
        """The number under a key; None if the file has none."""
        value = self._value(key)
        if value is not None and type(value) not in (int, float):
            raise self._wrong(key, value, "a number")
        return None if value is None else _shortest(float(value))

    def text(self, key: str) -> str:
        """The text under a key; raises BrokenFolder if there is none."""
        return self._needed(key, self.optional_text(key))

    def optional_text(self, key: str) -> str | None:
        """The text under a key; None if the file has none."""
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def flag(self, key: str) -> bool | None:
        """The truth value under a key; None if the file has none."""
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def sequence(self, key: str) -> Sequence[Any]:
        """The array under a key; empty if the file has none."""
        value = self._value(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, value, "an array")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """The array of texts under a key; empty if the file has none."""
        values = list(self.sequence(key))
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(key, values, "an array of texts")
        return values

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor; raises BrokenFolder if there is none of that name."""
        if tensor not in self.shapes:
            raise BrokenFolder(f"{self.file} has no tensor {tensor}")
        return self.shapes[tensor]

    def rows(self, tensor: str) -> int:
        """The rows of a matrix, or of each in a stack of matrices; raises BrokenFolder if the tensor is neither."""
        shape = self.shape(tensor)
        if len(shape) < 2:
            raise BrokenFolder(f"{self.file}: {tensor} must be a matrix or a stack of them, but its shape is {shape}")
        return shape[-2]

    def _value(self, key: str) -> Any:
        return self.metadata.get(self._full(key))

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _needed(self, key: str, value: T | None) -> T:
        if value is None:
            raise BrokenFolder(f"{self.file} has no {self._full(key)} in its metadata")
        return value

    def _same(self, key: str, values: Sequence[Any]) -> int | None:
        """The number that all layers have."""
        if any(type(value) is not int for value in values):
            raise self._wrong(key, values, "integers")
        if len(set(values)) > 1:
            raise UnsupportedModel(
                f"{self.file}: {self._full(key)} differs between layers, which is not supported: {values!r:.{_SHOWN}}"
            )
        return values[0] if values else None

    def _wrong(self, key: str, value: Any, expected: str) -> BrokenFolder:
        return BrokenFolder(f"{self.file}: {self._full(key)} must be {expected}, not {value!r:.{_SHOWN}}")


def _shortest(value: float) -> float:
    """The shortest decimal number that is equal in float32, which is what files store: 1e-06, not 9.999999974e-07."""
    return float(str(np.float32(value)))


def facts_of(files: Sequence[GgufFile]) -> GgufFacts:
    """What the files of a model say about it."""
    owners = {name: file for file in files for name in file.tensors}

    def values(name: str) -> Sequence[float]:
        file, info = owners[name], owners[name].tensors[name]
        if info.kind.name != "F32":
            raise BrokenFolder(f"{file.path.name}: {name} must be F32, not {info.kind.name}")
        if info.end > len(file.map):
            raise BrokenFolder(f"{file.path.name}: the file is truncated before the end of {name}, which is needed")
        return struct.unpack(f"<{(info.end - info.begin) // 4}f", file.map[info.begin : info.end])

    shapes = {name: file.tensors[name].shape for name, file in owners.items()}
    return GgufFacts(files[0].path.name, files[0].metadata, shapes, values)

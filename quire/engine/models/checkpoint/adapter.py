"""Loads an adapter (LoRA) of a language model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.models.checkpoint.safetensors import SafetensorsFile
from quire.engine.models.checkpoint.weights import check_finite
from quire.engine.models.config.adapter import AdapterConfig
from quire.engine.models.errors import BrokenFolder, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.specs.tensor_names import WeightNames

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>A|B)(?:\.(?P<name>[^.]+))?\.weight")
_BASE = ".base_layer."  # in the names of weights that have adapters beside them in the same checkpoint


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a loaded model.

    Attributes:
        digest: of its weights and their scales: adapters with equal ones compute the same keys and values.
    """

    name: str
    digest: bytes


class AdapterLoader:
    """Collect the weights of an adapter, and add them to the linear layers of a model."""

    def __init__(self, config: AdapterConfig, names: WeightNames) -> None:
        """`names`: how the checkpoint names the tensors of the model."""
        self._config = config
        self._names = names
        self._sides: dict[str, dict[str, Tensor]] = {}  # by module

    def read_file(self, folder: Path) -> None:
        """Read the adapter's own file, if it has one.

        Raises:
            BrokenFolder: it is missing, or cannot be read.
            UnsupportedModel: it holds something else than pairs of weights.
        """
        if self._config.file is None:
            return
        path = folder / self._config.file
        if not path.is_file():
            raise BrokenFolder(f"{path.parent} has the config of an adapter, but {path.name} is missing")
        with SafetensorsFile(path) as file:
            for name in file.names():
                match = _TENSOR.fullmatch(name)
                if match is None:
                    raise UnsupportedModel(
                        f"{self._config.file}: {name} is not a weight of a low-rank adapter (lora_A or lora_B)"
                    )
                self._keep(match, file.tensor(name))

    def apply(self, lora_id: int, model: Transformer, dtype: torch.dtype, device: torch.device) -> Adapter:
        """Add the adapter to a model whose weights are loaded, and whose number of adapters is known.

        Raises:
            UnsupportedModel: it adapts a module whose adapter is not supported.
            WeightMismatch: there are no weights, one is missing, or has the wrong shape.
        """
        if not self._sides:
            raise WeightMismatch(f"there are no weights of the adapter {self._config.name!r} in the checkpoint")
        layers = _adaptable(model)
        digest = hashlib.sha256()
        parts: dict[str, list[_Part]] = {}
        for module, sides in sorted(self._sides.items()):
            if len(sides) < 2:
                raise WeightMismatch(f"the adapter has only one of lora_A and lora_B for {module}")
            target = self._names.target(f"{module}.weight", layers)
            if target is None:
                raise UnsupportedModel(
                    f"the adapter changes {module}; supported are the projections of attention and feed-forward of the "
                    "language model's layers"
                )
            lora_a, lora_b = sides["A"], sides["B"]
            linear = layers[target.parameter]
            outputs = sum(linear.parts) if target.part is None else linear.parts[target.part]
            if lora_a.dim() != 2 or lora_a.shape[1] != linear.size_in or tuple(lora_b.shape) != (outputs, len(lora_a)):
                raise WeightMismatch(
                    f"the adapter's weights for {module} have shapes {tuple(lora_a.shape)} and {tuple(lora_b.shape)}, "
                    f"which do not fit to {linear.size_in} inputs and {outputs} outputs"
                )
            part = _Part(target.part, lora_a, lora_b, self._config.scale(module, len(lora_a)))
            digest.update(f"{module} {part.scale} {lora_a.dtype} {lora_b.dtype} {tuple(lora_b.shape)}".encode())
            for weight in (lora_a, lora_b):
                digest.update(weight.view(torch.uint8).numpy().tobytes())
            parts.setdefault(target.parameter, []).append(part)
        self._sides.clear()
        for parameter in list(parts):
            weights = (weight.to(device, dtype) for weight in _joined(layers[parameter], parts.pop(parameter), dtype))
            layers[parameter].put_lora(lora_id, *weights, num_adapters=model.num_adapters)
        return Adapter(self._config.name, digest.digest())

    def take(self, match: re.Match[str], tensor: Tensor) -> None:
        """Keep a weight in the checkpoint, if it is one of this adapter."""
        if self._config.file is None and match["name"] == self._config.name:
            self._keep(match, tensor)

    def _keep(self, match: re.Match[str], tensor: Tensor) -> None:
        sides = self._sides.setdefault(match["module"], {})
        if match["side"] in sides:
            raise WeightMismatch(f"{match[0]} occurs more than once in the adapter")
        sides[match["side"]] = tensor.clone()  # it is valid until the next one is read
        check_finite(match[0], sides[match["side"]])


def without_adapters(
    tensors: Iterable[tuple[str, Tensor]], loaders: Collection[AdapterLoader]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint without those of adapters, which `loaders` take, under the names they have then."""
    for name, tensor in tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            yield name.replace(_BASE, "."), tensor
            continue
        for loader in loaders:
            loader.take(match, tensor)


@dataclass(frozen=True, slots=True)
class _Part:
    """The adapter of a projection. `index`: of the projection in its linear layer; None: it is all of it."""

    index: int | None
    lora_a: Tensor
    lora_b: Tensor
    scale: float


def _joined(linear: Linear, parts: list[_Part], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights of an adapter for all projections in a linear layer, one rank behind the other."""
    lora_a = torch.cat([part.lora_a.to(dtype) for part in parts])
    lora_b = torch.zeros(sum(linear.parts), len(lora_a))
    column = 0
    for part in parts:
        row = 0 if part.index is None else sum(linear.parts[: part.index])
        outputs, rank = part.lora_b.shape
        lora_b[row : row + outputs, column : column + rank] = part.lora_b.float() * part.scale
        column += rank
    return lora_a, lora_b


def _adaptable(model: Transformer) -> dict[str, Linear]:
    """The linear layers that may be adapted, by the names of their weights."""
    return {
        f"layers.{index}.{inner}.{name}.weight": linear
        for index, layer in enumerate(model.layers)
        for inner, kinds in (("attn", GroupedAttentionLayer), ("ffn", GatedMLPLayer | PlainMLPLayer))
        if isinstance(part := getattr(layer, inner), kinds)
        for name, linear in part.named_children()
        if isinstance(linear, Linear)
    }

"""Loads the adapter that a language model uses for requests with audio."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.models.checkpoint.safetensors import SafetensorsFile
from quire.engine.models.checkpoint.weights import check_finite
from quire.engine.models.config.adapter import AdapterConfig
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.specs.tensor_names import WeightNames

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>A|B)(?:\.(?P<name>[^.]+))?\.weight")
_BASE = ".base_layer."  # in the names of weights that have adapters beside them in the same checkpoint


class AdapterLoader:
    """Collects the weights of an adapter, and adds them to the linear layers of a model."""

    def __init__(self, config: AdapterConfig, names: WeightNames) -> None:
        """`names`: how the checkpoint names the tensors of the model."""
        self._config = config
        self._names = names
        self._sides: dict[str, dict[str, Tensor]] = {}  # by module

    def without_adapters(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint without those of adapters, under the names that they have then."""
        for name, tensor in tensors:
            match = _TENSOR.fullmatch(name)
            if match is None:
                yield name.replace(_BASE, "."), tensor
            elif self._config.file is None and match["name"] == self._config.name:
                self._keep(match, tensor)

    def read_file(self, folder: Path) -> None:
        """Read the adapter's own file, if it has one.

        Raises:
            UnsupportedModel: it holds something else than pairs of weights.
        """
        if self._config.file is None:
            return
        with SafetensorsFile(folder / self._config.file) as file:
            for name in file.names():
                match = _TENSOR.fullmatch(name)
                if match is None:
                    raise UnsupportedModel(
                        f"{self._config.file}: {name} is not a weight of a low-rank adapter (lora_A or lora_B)"
                    )
                self._keep(match, file.tensor(name))

    def apply(self, model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
        """Add the adapter to a model whose weights are loaded.

        Raises:
            UnsupportedModel: it adapts a module whose adapter is not supported.
            WeightMismatch: there are no weights, one is missing, or has the wrong shape.
        """
        if not self._sides:
            raise WeightMismatch(f"there are no weights of the adapter {self._config.name!r} in the checkpoint")
        layers = _adaptable(model)
        parts: dict[str, list[_Part]] = {}
        for module, sides in self._sides.items():
            if len(sides) < 2:
                raise WeightMismatch(f"the adapter has only one of lora_A and lora_B for {module}")
            target = self._names.target(f"{module}.weight", layers)
            if target is None:
                raise UnsupportedModel(
                    f"the adapter changes {module}; supported are the projections of attention and feed-forward of the "
                    "language model's layers"
                )
            down, up = sides["A"], sides["B"]
            linear = layers[target.parameter]
            outputs = sum(linear.parts) if target.part is None else linear.parts[target.part]
            if down.dim() != 2 or down.shape[1] != linear.size_in or tuple(up.shape) != (outputs, len(down)):
                raise WeightMismatch(
                    f"the adapter's weights for {module} have shapes {tuple(down.shape)} and {tuple(up.shape)}, "
                    f"which do not fit to {linear.size_in} inputs and {outputs} outputs"
                )
            part = _Part(target.part, down, up, self._config.scale(module, len(down)))
            parts.setdefault(target.parameter, []).append(part)
        self._sides.clear()
        for parameter in list(parts):
            _adapt(layers[parameter], parts.pop(parameter), dtype, device)

    def _keep(self, match: re.Match[str], tensor: Tensor) -> None:
        sides = self._sides.setdefault(match["module"], {})
        if match["side"] in sides:
            raise WeightMismatch(f"{match[0]} occurs more than once in the adapter")
        sides[match["side"]] = tensor.clone()  # it is valid until the next one is read
        check_finite(match[0], sides[match["side"]])


@dataclass(frozen=True, slots=True)
class _Part:
    """The adapter of a projection. `index`: of the projection in its linear layer; None: it is all of it."""

    index: int | None
    down: Tensor
    up: Tensor
    scale: float


def _adapt(linear: Linear, parts: list[_Part], dtype: torch.dtype, device: torch.device) -> None:
    """Add the adapters of the projections in a linear layer, one rank behind the other."""
    down = torch.cat([part.down.to(dtype) for part in parts])
    up = torch.zeros(sum(linear.parts), len(down))
    column = 0
    for part in parts:
        row = 0 if part.index is None else sum(linear.parts[: part.index])
        outputs, rank = part.up.shape
        up[row : row + outputs, column : column + rank] = part.up.float() * part.scale
        column += rank
    linear.adapt(down.to(device), up.to(device, dtype))


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

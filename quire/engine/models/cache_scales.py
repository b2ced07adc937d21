"""Scales of float8 KV caches, which some checkpoints have beside their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from quire.engine.models.errors import BrokenFolder
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.sharded_decoder import ShardedDecoder
from quire.engine.models.spec import DecoderSpec, GroupedQueryAttention
from quire.engine.models.transformer import Transformer

_NAME = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn\.(?:[kv]_proj\.)?(?P<kind>k|v|kv)_scale")


class CacheScales:
    """The scales of keys and values of each layer: an element in a float8 page times its scale is the cached number."""

    def __init__(self, spec: DecoderSpec) -> None:
        """`spec`: that of the whole decoder."""
        self._layers = [layer.attn for layer in spec.layers]
        self._keys: dict[int, float] = {}
        self._values: dict[int, float] = {}

    def without_scales(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keep the scales of layers with grouped-query attention, and yield all other tensors.

        Raises:
            BrokenFolder: a scale is not one positive number.
        """
        for name, tensor in tensors:
            match = _NAME.fullmatch(name)
            layer = -1 if match is None else int(match["layer"])
            if match is None or not self._has_scales(layer):
                yield name, tensor
                continue
            scale = _positive(name, tensor)
            if "k" in match["kind"]:
                self._keys[layer] = scale
            if "v" in match["kind"]:
                self._values[layer] = scale

    def apply(self, model: Transformer) -> None:
        """Give the layers of the decoder, or of a part of it, their scales."""
        first = model.stage.start if isinstance(model, ShardedDecoder) else 0
        for index, layer in enumerate(model.layers, first):
            attention = layer.attn
            if isinstance(attention, GroupedAttentionLayer):
                attention.key_scale = self._keys.get(index, 1.0)
                attention.value_scale = self._values.get(index, 1.0)

    def _has_scales(self, layer: int) -> bool:
        return layer < len(self._layers) and isinstance(self._layers[layer], GroupedQueryAttention)


def _positive(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise BrokenFolder(f"{name} must be one number, but has shape {tuple(tensor.shape)}")
    scale = float(tensor)
    if not 0.0 < scale < math.inf:
        raise BrokenFolder(f"{name} must be a positive number, not {scale}")
    return scale

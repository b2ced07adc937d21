"""Scales of float8 KV caches, which some checkpoints have beside their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.latent_attention import LatentAttentionLayer
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, LatentAttention

# The module before the scale is that of a checkpoint's tool or of the server that it was made for: ModelOpt has
# projections; vLLM has attn or, for latent attention, mla_attn.mla_attn; SGLang has attn_mqa.
_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:[kv]_proj|kv_b_proj|attn|attn_mqa|mla_attn(?:\.mla_attn)?)\.)?(?P<kind>k|v|kv|q)_scale"
)


class CacheScales:
    """The scales of keys and values of each layer: an element in a float8 page times its scale is the cached number."""

    def __init__(self, spec: DecoderSpec) -> None:
        """`spec`: that of the whole decoder."""
        self._layers = [layer.attn for layer in spec.layers]
        self._keys: dict[int, float] = {}
        self._values: dict[int, float] = {}

    def without_scales(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keep the scales of the decoder's layers, and yield all other tensors.

        Scales of queries are left out: queries are not quantized.

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
        for index, attention in _attention_layers(model):
            attention.key_scale = self._keys.get(index, 1.0)
            alone = attention.key_scale if isinstance(attention, LatentAttentionLayer) else 1.0
            attention.value_scale = self._values.get(index, alone)

    def _has_scales(self, layer: int) -> bool:
        return layer < len(self._layers) and isinstance(self._layers[layer], GroupedQueryAttention | LatentAttention)


def check_scales(model: Transformer) -> None:
    """Check that a KV cache of float8 can represent the scales of a decoder, or of a part of it.

    Raises:
        UnsupportedModel: a layer of latent attention has another scale for values, which are a part of keys.
    """
    for index, attention in _attention_layers(model):
        if isinstance(attention, LatentAttentionLayer) and attention.key_scale != attention.value_scale:
            raise UnsupportedModel(
                f"--kv-cache-dtype fp8: layer {index} has k_scale {attention.key_scale} and v_scale "
                f"{attention.value_scale}, but latent attention has one scale for both; auto and int8 are accepted here"
            )


def _attention_layers(model: Transformer) -> Iterator[tuple[int, GroupedAttentionLayer | LatentAttentionLayer]]:
    """The layers that may have scales, and their index in the whole decoder."""
    first = model.stage.start if isinstance(model, ShardedDecoder) else 0
    for index, layer in enumerate(model.layers, first):
        if isinstance(layer.attn, GroupedAttentionLayer | LatentAttentionLayer):
            yield index, layer.attn


def _positive(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise BrokenFolder(f"{name} must be one number, but has shape {tuple(tensor.shape)}")
    scale = float(tensor)
    if not 0.0 < scale < math.inf:
        raise BrokenFolder(f"{name} must be a positive number, not {scale}")
    return scale

"""Scales of float8 KV caches, which some checkpoints have beside their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.latent_attention import LatentAttentionLayer
from quire.engine.models.layers.shared_keys import SharedKeysLayer
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, LatentAttention

# The module before the scale is that of a checkpoint's tool or of the server that it was made for: ModelOpt has
# projections; vLLM has attn or, for latent attention, mla_attn.mla_attn; SGLang has attn_mqa. Older tools, and Quark,
# have the scale of what a projection puts out.
_NAME = re.compile(
    r"(?:.*\.)?(?:layers|h)\.(?P<layer>\d+)\.(?:self_attn|self_attention|attention|attn|mixer)\."
    r"(?:(?:(?:(?:[qkv]|qkv|kv_b)_proj|attn|attn_mqa|mla_attn(?:\.mla_attn)?)\.)?"
    r"(?P<kind>k|v|kv|q|prob|p)_(?P<what>scale|zero_point)|(?P<projection>[qkv])_proj\.output_(?P<output>scale|zero_point))"
)
_ONE = torch.ones(1)


class CacheScales:
    """The scales of keys and values of each layer: an element in a float8 page times its scale is the cached number."""

    def __init__(self, spec: DecoderSpec) -> None:
        """`spec`: that of the whole decoder."""
        self._layers = [layer.attn for layer in spec.layers]
        self._keys: dict[int, Tensor] = {}  # by layer: one, or one for each head
        self._values: dict[int, Tensor] = {}

    def without_scales(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Keep the scales of the decoder's layers, and yield all other tensors.

        Scales of queries and of probabilities are left out: these are not quantized.

        Raises:
            BrokenFolder: a scale is not one positive number, or one for each KV head.
            UnsupportedModel: there is a zero point that is not 0.
        """
        for name, tensor in tensors:
            match = _NAME.fullmatch(name)
            layer = -1 if match is None else int(match["layer"])
            if match is None or not self._has_scales(layer):
                yield name, tensor
                continue
            kind = match["kind"] or match["projection"]
            if kind not in ("k", "v", "kv"):
                continue
            if "zero_point" in (match["what"], match["output"]):
                _check_zero(name, tensor)
                continue
            scales = _positive(name, tensor, self._heads(layer))
            if "k" in kind:
                self._keys[layer] = scales
            if "v" in kind:
                self._values[layer] = scales

    def apply(self, model: Transformer) -> None:
        """Give the layers of the decoder, or of a part of it, their scales."""
        for index, attention in _attention_layers(model):
            keys = self._keys.get(index, _ONE)
            values = self._values.get(index, keys if isinstance(attention, LatentAttentionLayer) else _ONE)
            if keys.numel() == values.numel() == 1:
                attention.key_scale, attention.value_scale = float(keys), float(values)
            else:
                assert isinstance(attention, GroupedAttentionLayer)  # of latent attention, heads share keys
                heads = self._heads(index)
                both = torch.stack((keys.expand(heads), values.expand(heads)))
                attention.head_scales = both[:, _local_heads(model, heads, attention.spec.kv_heads)].contiguous()

    def _has_scales(self, layer: int) -> bool:
        return layer < len(self._layers) and isinstance(self._layers[layer], GroupedQueryAttention | LatentAttention)

    def _heads(self, layer: int) -> int:
        """Heads of keys and values of a layer."""
        attention = self._layers[layer]
        return attention.kv_heads if isinstance(attention, GroupedQueryAttention) else 1


def _local_heads(model: Transformer, heads: int, local: int) -> slice:
    """The KV heads that a rank has, which are divided into fewer pieces than there are ranks."""
    if not isinstance(model, ShardedDecoder):
        return slice(None)
    pieces, placement = heads // local, model.placement
    begin = placement.tensor_rank * pieces // placement.tensor_size * local
    return slice(begin, begin + local)


def check_scales(model: Transformer) -> None:
    """Check that a KV cache of float8 can represent the scales of a decoder, or of a part of it.

    Raises:
        UnsupportedModel: a layer of latent attention has another scale for values, which are a part of keys; or a layer
            whose keys and values others read has scales.
    """
    shares_keys = any(isinstance(layer.attn, SharedKeysLayer) for layer in model.layers)
    for index, attention in _attention_layers(model):
        if shares_keys and isinstance(attention, GroupedAttentionLayer) and _has_scales(attention):
            raise UnsupportedModel(
                f"--kv-cache-dtype fp8: layer {index} has scales of keys and values, which layers that share them do "
                "not apply; accepted here are int8, and the data type of the model: bfloat16 or float16"
            )
        if isinstance(attention, LatentAttentionLayer) and attention.key_scale != attention.value_scale:
            raise UnsupportedModel(
                f"--kv-cache-dtype fp8: layer {index} has k_scale {attention.key_scale} and v_scale "
                f"{attention.value_scale}, but latent attention has one scale for both; accepted here are int8, and "
                "the data type of the model: bfloat16 or float16, or auto if the checkpoint does not ask for fp8"
            )


def _has_scales(attention: GroupedAttentionLayer) -> bool:
    return (attention.key_scale, attention.value_scale) != (1, 1) or attention.head_scales is not None


def _attention_layers(model: Transformer) -> Iterator[tuple[int, GroupedAttentionLayer | LatentAttentionLayer]]:
    """The layers that may have scales, and their index in the whole decoder."""
    first = model.stage.start if isinstance(model, ShardedDecoder) else 0
    for index, layer in enumerate(model.layers, first):
        if isinstance(layer.attn, GroupedAttentionLayer | LatentAttentionLayer):
            yield index, layer.attn


def _positive(name: str, tensor: Tensor, heads: int) -> Tensor:
    """One scale, or one for each head: (heads,) float32."""
    scales = tensor.float().flatten().clone()
    if len(scales) not in (1, heads):
        accepted = "one number" if heads == 1 else f"one number, or one for each of {heads} KV heads"
        raise BrokenFolder(f"{name} must be {accepted}, but has shape {tuple(tensor.shape)}")
    for scale in scales.tolist():
        if not 0.0 < scale < math.inf:
            raise BrokenFolder(f"{name} must be a positive number, not {scale}")
    return scales


def _check_zero(name: str, tensor: Tensor) -> None:
    if bool((tensor.float() != 0).any()):
        raise UnsupportedModel(f"{name} is not 0: a KV cache with zero points is not supported, only with scales")

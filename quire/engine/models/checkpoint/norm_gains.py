"""Moves the gains of norms into the weights that read their results, before these are quantized.

A product of 8 bits quantizes each row of its input with one scale. Channels with large gains take most of its range, so
that the others are rounded to little. In the weights, whose outputs have a scale each, the same factors cost nothing.
The idea is SmoothQuant's (Xiao et al. 2022), without data: the gain says how large a channel is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from quire.engine.models.layers.attention import GroupedAttentionLayer
from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.layers.norm import LayerNorm, RMSNorm
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.networks.stack import TransformerLayer

Norm = LayerNorm | RMSNorm
_LARGE = 3.0  # standard deviations: where a channel's largest values are
_LEAST = 1e-4  # of the largest factor; channels that are always zero have it


class NormGains:
    """The norms of a model whose gains move; see `normed_linears`."""

    def __init__(self, model: nn.Module, pairs: Iterable[tuple[Norm, tuple[Linear, ...]]]) -> None:
        """`pairs`: norms, and all layers that read the result of each."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._norm_of = {linear: norm for norm, linears in pairs for linear in linears}
        self._missing = {
            norm: {names[id(parameter)] for parameter in norm.parameters()} for norm in self._norm_of.values()
        }
        self._factors: dict[Norm, Tensor] = {}
        self._waiting: list[Packable] = []

    def loaded(self, parameter: str, layers: Iterable[Packable]) -> Iterator[Packable]:
        """Give the layers that can be packed now that a parameter is complete: with the factors of their norms.

        Args:
            parameter: its name.
            layers: those that have it as their weight.
        """
        for norm, missing in self._missing.items():
            if parameter in missing:
                missing.remove(parameter)
                if not missing:
                    self._factors[norm] = _take_factors(norm)
        waiting, self._waiting = self._waiting, []
        for layer in (*waiting, *layers):
            before = self._norm_of.get(layer) if isinstance(layer, Linear) else None
            if before is not None and before not in self._factors:
                self._waiting.append(layer)
                continue
            if before is not None:
                assert layer.weight is not None
                layer.weight.data *= self._factors[before]
            yield layer


def normed_linears(model: nn.Module) -> Iterator[tuple[Norm, tuple[Linear, ...]]]:
    """Norms of a speech model with cross-attention, and the layers that read their results.

    Only for these models it has been measured; others may have adapters, which read the results of norms as well.
    """
    if not isinstance(model, Decoder) or model.encoder is None:
        return
    layers = [layer for layer in (*model.encoder.layers, *model.layers) if isinstance(layer, TransformerLayer)]
    crosses = [layer.cross for layer in layers if layer.cross is not None]
    if not crosses or model.encoder.projector is not None:
        return
    for layer in layers:
        yield from _pairs(layer)
    if isinstance(model.encoder.norm, Norm):
        yield model.encoder.norm, tuple(linear for cross in crosses for linear in (cross.k, cross.v))


def _pairs(layer: TransformerLayer) -> Iterator[tuple[Norm, tuple[Linear, ...]]]:
    """The norms within a layer. A norm that two branches read stays as it is."""
    if layer.parallel is not None:
        return
    if isinstance(layer.attn_norm, Norm) and isinstance(layer.attn, GroupedAttentionLayer):
        yield layer.attn_norm, (layer.attn.qkv,)
    if isinstance(layer.cross_norm, Norm) and layer.cross is not None:
        yield layer.cross_norm, (layer.cross.q,)
    if isinstance(layer.ffn_norm, Norm):
        match layer.ffn:
            case PlainMLPLayer():
                yield layer.ffn_norm, (layer.ffn.up,)
            case GatedMLPLayer():
                yield layer.ffn_norm, (layer.ffn.gate_up,)


def _take_factors(norm: Norm) -> Tensor:
    """Divide a norm by factors that make its channels equally large; returns them."""
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    gains = norm.weight.float() + offset
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    size = gains.abs() if bias is None else gains.abs() + bias.float().abs() / _LARGE
    factors = size.clamp_min(_LEAST * float(size.max())) if size.any() else torch.ones_like(size)
    norm.weight.data = (gains / factors - offset).to(norm.weight.dtype)
    if bias is not None:
        bias.data = (bias.float() / factors).to(bias.dtype)
    return factors.to(norm.weight.dtype)

"""Builds the modules of transformers that encode the pictures of a composite model, with kernels of Quire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from typing_extensions import override

from quire.engine.models.layers.linear import Linear, LoRARows
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.linear import Quantization
from quire.kernels.varlen_attention import EncoderAttentionParams, varlen_attention

_NAME = "quire_tower"  # of the attention, for transformers


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of all tokens to each other; transformers' own where some are hidden.

    query, key, value: (images, heads, tokens, dim). Returns (images, tokens, heads, dim).
    """
    images, _, tokens, dim = query.shape
    if key.shape != query.shape or not _shows_all(attention_mask) or options.get("is_causal"):
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attended, None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    offsets = torch.arange(0, (images + 1) * tokens, tokens, device=query.device)
    params = EncoderAttentionParams(scale=dim**-0.5 if scaling is None else scaling)
    return varlen_attention(q, k, v, offsets, params).unflatten(0, (images, tokens)), None


def _shows_all(mask: Tensor | None) -> bool:
    """Whether a mask hides nothing: one of zeros that are added, or of booleans that are true."""
    if mask is None:
        return True
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


class TowerLinear(Linear):
    """A linear layer in the place of torch's, for inputs of any number of dimensions. It is never quantized.

    Attributes:
        act: activation that follows it; None: none.
    """

    is_exact = True
    act: str | None = None

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        super().pack_weights("none")

    @override
    def forward(
        self,
        x: Tensor,
        *,
        act: str | None = None,
        lora: LoRARows | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = super().forward(rows, act=act or self.act, lora=lora, out_dtype=out_dtype, out=out)
        return y.view(*x.shape[:-1], -1)


class PatchConv(nn.Conv2d):
    """A convolution of patches, of whose result the channels of a patch lie together, as the layers read them."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous(memory_format=torch.channels_last)


def empty_tower(config: Any, language_model: str | None) -> Any:
    """transformers' model for a config, without its language model, on the meta device.

    `language_model`: the attribute of the language model; None: there is none.
    """
    config._attn_implementation = _NAME
    with torch.device("meta"):
        model = AutoModel.from_config(config)
        if language_model is not None:
            delattr(model, language_model)
        for module in [*model.modules()]:
            for name, child in [*module.named_children()]:
                setattr(module, name, _replacement(child))
            _fuse_activation(module)
    return model.eval()


def _replacement(module: nn.Module) -> nn.Module:
    """Quire's layer in the place of torch's, with parameters of the same names and shapes; or the module itself."""
    if type(module) is nn.Linear:
        return TowerLinear(module.in_features, module.out_features, bias=module.bias is not None)
    if type(module) is nn.Conv2d and module.kernel_size == module.stride:
        module.__class__ = PatchConv
    return module


def _fuse_activation(module: nn.Module) -> None:
    """Let the first linear layer of a feed-forward compute its activation."""
    first, config = getattr(module, "fc1", None), getattr(module, "config", None)
    act = getattr(config, "hidden_act", None)
    has_act = isinstance(getattr(module, "activation_fn", None), nn.Module)
    if isinstance(first, TowerLinear) and has_act and act in ACTIVATIONS:
        first.act, module.activation_fn = act, nn.Identity()

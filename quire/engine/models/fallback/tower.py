"""Builds the modules of transformers that encode the pictures of a composite model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from typing_extensions import override

from quire.engine.models.layers.linear import Linear, LoRARows
from quire.kernels.linear import Quantization


class TowerLinear(Linear):
    """A linear layer in the place of torch's, for inputs of any number of dimensions. It is never quantized."""

    is_exact = True

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
        rows = super().forward(x.reshape(-1, x.shape[-1]), act=act, lora=lora, out_dtype=out_dtype, out=out)
        return rows.view(*x.shape[:-1], -1)


def empty_tower(config: Any, language_model: str) -> Any:
    """transformers' model for a config, without its language model, on the meta device.

    `language_model`: the attribute of the language model.
    """
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = AutoModel.from_config(config)
        delattr(model, language_model)
        for name, module in [*model.named_modules()]:
            if type(module) is nn.Linear:
                parent, _, attribute = name.rpartition(".")
                linear = TowerLinear(module.in_features, module.out_features, bias=module.bias is not None)
                setattr(model.get_submodule(parent), attribute, linear)
    return model.eval()

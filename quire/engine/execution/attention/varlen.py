"""Attention of an encoder's step: each sequence attends to itself, without a cache."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from quire.engine.models.layers.inputs import StepAttention
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.varlen_attention import EncoderAttentionParams, varlen_attention


class VarlenAttention(StepAttention):
    """Attention of an encoder's step: each sequence attends to itself, and no keys or values are stored."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        """`cu_seqlens`: see `ModelInputs`."""
        self._cu_seqlens = cu_seqlens

    @override
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        assert v is not None
        if self._cu_seqlens.device != q.device:
            self._cu_seqlens = self._cu_seqlens.to(q.device)  # once for all layers
        encoder_params = EncoderAttentionParams(
            params.scale,
            None if params.window is None else params.window - 1,
            params.softcap,
            params.alibi,
            params.bias,
        )
        return varlen_attention(q, k, v, self._cu_seqlens, encoder_params)

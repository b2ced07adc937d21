"""The largest step of a model, which shows how much memory intermediate results take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepStates
from quire.engine.models.networks.decoder import LanguageModel
from quire.engine.models.specs.cache import CacheShape, StateCache
from quire.kernels.paged_attention import AttentionParams


@torch.inference_mode()
def run_largest_step(
    model: LanguageModel, max_tokens: int, max_seqs: int, context_len: int, device: torch.device
) -> None:
    """Run a step of `max_tokens` tokens, of which as many as possible are sampled, without a KV cache."""
    tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(max_tokens, device=device) % context_len
    sampling = torch.arange(min(max_tokens, max_seqs), device=device)
    groups = model.cache_groups(context_len)
    kinds = {layer: group.kind for group in groups if isinstance(group.kind, StateCache) for layer in group.layers}
    states = _NoStates(kinds, max_tokens, device) if kinds else None
    inputs = ModelInputs(tokens, positions, sampling, states=states)
    hidden = model.run(inputs, _NoAttention(model.caches, len(sampling)), last_token_only=True, cross=_no_cross)
    logits = model.lm_head.logits(hidden)
    logits.softmax(-1).sort(-1)  # about what sampling takes


class _NoAttention(StepAttention):
    """Stand in for attention: the result has its shape only."""

    def __init__(self, caches: Mapping[int, CacheShape], sampling: int) -> None:
        self._caches = caches
        self._sampling = sampling

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
        return self.read(layer, q, params, last_layer=last_layer, last_token_only=last_token_only)

    @override
    def read(
        self,
        layer: int,
        q: Tensor,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        rows = self._sampling if last_layer and last_token_only else len(q)
        return q.new_zeros(rows, q.shape[1], self._caches[layer].value_dim)

    @override
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        pass


class _NoStates(StepStates):
    """Stand in for the states of one sequence, which has all tokens."""

    def __init__(self, kinds: Mapping[int, StateCache], tokens: int, device: torch.device) -> None:
        self.ranges = [(0, tokens)]
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.tensor([0, tokens])
        self._kinds = kinds
        self._device = device

    @override
    def read(self, layer: int) -> list[Tensor]:
        return self.arrays(layer)

    @override
    def arrays(self, layer: int) -> list[Tensor]:
        return [
            torch.zeros(1, *array.shape, dtype=getattr(torch, array.dtype), device=self._device)
            for array in self._kinds[layer].arrays
        ]

    @override
    def write(self, layer: int, arrays: Sequence[Tensor]) -> None:
        pass


def _no_cross(layer: int, q: Tensor, params: AttentionParams, *, logits_rows: bool = False) -> Tensor:
    return torch.zeros_like(q)

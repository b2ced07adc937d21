"""Aligner: alignment of the tokens of a transcription with the encoded positions of its audio.

The cross-attention of some heads follows the audio. Their weights are normalized over the tokens, smoothed over time
and averaged, as for whisper's word timestamps (Radford et al. 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray
from quire.engine.execution.attention.cross_attention import pad_heads, read_rows
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.inputs import StepCrossAttention
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.kernels.paged_attention import AttentionParams


@dataclass(slots=True)
class _Weights:
    """The weights of one sequence so far: (heads, tokens, positions) of each chunk, by layer and first position."""

    chunks: dict[int, dict[int, Tensor]] = field(default_factory=dict)


class Aligner:
    """Keep the weights of the sequences that align, by row of the request table."""

    def __init__(self, spec: SpeechToTextSpec, table: RequestTable, layers: Mapping[int, LayerCache]) -> None:
        """`layers`: the pages of each layer."""
        self._table = table
        self._layers = layers
        self._median_width = spec.median_width
        self._heads: dict[int, list[int]] = {}
        for layer, head in spec.alignment_heads:
            self._heads.setdefault(layer, []).append(head)
        self._rows: dict[int, _Weights] = {}

    @property
    def rows(self) -> Collection[int]:
        """Rows of requests that align."""
        return self._rows

    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        """Follow the rows of the table: some were freed, then some were filled."""
        for row in freed:
            self._rows.pop(row, None)
        for row in filled:
            pooling_params = self._table[row].params
            if isinstance(pooling_params, PoolingParams) and pooling_params.task == "align":
                self._rows[row] = _Weights()

    def watch(self, attend: StepCrossAttention, spans: Sequence[Span]) -> StepCrossAttention:
        """`attend`, which also keeps the weights of the spans of `rows`."""
        watched = [span for span in spans if span.row in self._rows]

        def attend_and_keep(layer: int, q: Tensor, params: AttentionParams, *, logits_rows: bool = False) -> Tensor:
            if heads := self._heads.get(layer):
                for span in watched:
                    self._keep(layer, heads, q[span.offset : span.offset + span.count, heads], params, span)
            return attend(layer, q, params, logits_rows=logits_rows)

        return attend_and_keep if watched else attend

    def finish(self, span: Span) -> PooledArray | None:
        """The alignment (tokens - skip_tokens, positions), once the last token of a span of one of `rows` is done."""
        row = self._table[span.row]
        if span.length < row.prompt_len:
            return None
        pooling_params = row.params
        assert isinstance(pooling_params, PoolingParams)
        chunks = self._rows[span.row].chunks
        weights = torch.cat([torch.cat([part for _, part in sorted(chunks[layer].items())], 1) for layer in chunks])
        weights = weights[:, pooling_params.skip_tokens :]
        deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
        # Where all tokens have the same weight, as a single token has, no frame is more its own than another.
        weights = torch.where(deviation > 0, (weights - mean) / deviation, 0.0)
        aligned = _median_filter(weights, self._median_width).mean(0)
        return aligned.cpu().numpy()

    def _keep(self, layer: int, heads: list[int], q: Tensor, params: AttentionParams, span: Span) -> None:
        """q: (tokens, len(heads), dim) of a span."""
        cache, table = self._layers[layer], self._table
        length = int(table.cross_lengths[span.row])
        blocks = torch.from_numpy(table.cross_blocks[span.row, : -(-length // table.block_size)]).to(q.device)
        keys = read_rows(cache.keys, blocks, length, q.dtype)[heads].float()
        scores = pad_heads(q, cache.shape.key_elements).float().transpose(0, 1) @ keys.transpose(1, 2)
        pooling_params = table[span.row].params
        assert isinstance(pooling_params, PoolingParams)
        weights = (scores * params.scale).softmax(-1)[..., : pooling_params.num_positions].contiguous()
        # By position: a step that fails is computed once more.
        self._rows[span.row].chunks.setdefault(layer, {})[span.start] = weights


def _median_filter(x: Tensor, width: int) -> Tensor:
    """The median of `width` neighbours in the last dimension, which is mirrored at its ends; a shorter one as it is."""
    reach = width // 2
    if x.shape[-1] <= reach or width == 1:
        return x
    windows = F.pad(x, (reach, reach), mode="reflect").unfold(-1, width, 1)
    return windows.median(-1).values

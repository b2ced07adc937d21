"""Pools the hidden states of prompts, which may be computed in several chunks, and runs the heads on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.client.pooling_params import PoolingParams, PoolingType
from quire.engine.client.protocol import PooledArray, TokenArray
from quire.engine.execution.inputs import Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.heads import PoolerHeads, run_steps
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.specs.pooler import PoolerSpec, SparseHead
from quire.engine.scheduling.plan import NOT_FINITE, StepResult
from quire.kernels.add_rows import add_rows


class _Pooling(ABC):
    """The pooled state of one sequence. `add` gets the hidden states of its tokens in order, chunk by chunk."""

    @abstractmethod
    def add(self, hidden: Tensor) -> None:
        """Take the hidden states (tokens, hidden) of the next tokens."""

    @abstractmethod
    def result(self) -> Tensor:
        """The pooled array, once all tokens were added."""


class _Last(_Pooling):
    def add(self, hidden: Tensor) -> None:
        self._last = hidden[-1].to(torch.float32, copy=True)

    def result(self) -> Tensor:
        return self._last


class _First(_Pooling):
    def __init__(self) -> None:
        self._first: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        if self._first is None and len(hidden):
            self._first = hidden[0].to(torch.float32, copy=True)

    def result(self) -> Tensor:
        assert self._first is not None
        return self._first


class _Mean(_Pooling):
    """Sum in float64, so that the order of the sums, and thus the chunking, does not show in float32."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        if self._sum is None:
            self._sum = torch.zeros(hidden.shape[1], dtype=torch.float64, device=hidden.device)
        add_rows(hidden, self._sum)
        self._count += len(hidden)

    def result(self) -> Tensor:
        assert self._sum is not None
        return (self._sum / max(1, self._count)).float()


class _MeanSqrtLen(_Mean):
    def result(self) -> Tensor:
        assert self._sum is not None
        root: float = max(1, self._count) ** 0.5
        return (self._sum / root).float()


class _WeightedMean(_Pooling):
    """Tokens weigh their position, counted from 1."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        first, end = self._count + 1, self._count + len(hidden) + 1
        weights = torch.arange(first, end, dtype=torch.float64, device=hidden.device)
        total = weights @ hidden.double()
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(hidden)

    def result(self) -> Tensor:
        assert self._sum is not None
        return (self._sum / max(1, self._count * (self._count + 1) / 2)).float()


class _Max(_Pooling):
    def __init__(self) -> None:
        self._max: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        if len(hidden):
            highest = hidden.amax(0).float()
            self._max = highest if self._max is None else torch.maximum(self._max, highest)

    def result(self) -> Tensor:
        assert self._max is not None
        return self._max


class _Sparse(_Pooling):
    """The values of a masked language model's head, a few positions at a time: their logits are large."""

    def __init__(self, spec: SparseHead, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits`: from hidden states to logits."""
        self._spec = spec
        self._logits = logits
        self._values: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        for part in hidden.split(_SPARSE_TOKENS):
            values = F.relu(self._logits(part))
            if self._spec.pooling == "max":
                values = values.amax(0)  # log(1 + x) is monotonic: of the largest only
                self._values = values if self._values is None else torch.maximum(self._values, values)
            else:
                values = self._logged(values).sum(0)
                self._values = values if self._values is None else self._values + values

    def result(self) -> Tensor:
        assert self._values is not None
        return self._values if self._spec.pooling == "sum" else self._logged(self._values)

    def _logged(self, values: Tensor) -> Tensor:
        values = values.log1p()
        return values.log1p() if self._spec.log_twice else values


class _All(_Pooling):
    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def add(self, hidden: Tensor) -> None:
        self._chunks.append(hidden.clone())

    def result(self) -> Tensor:
        return self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks)


_SPARSE_TOKENS = 128  # 16 MB of logits for a vocabulary of 32,768
_POOLINGS: dict[PoolingType, type[_Pooling]] = {
    "last": _Last,
    "cls": _First,
    "mean": _Mean,
    "max": _Max,
    "mean_sqrt_len": _MeanSqrtLen,
    "weighted_mean": _WeightedMean,
}


class Pooler:
    """Turn hidden states into the arrays that pooling requests ask for."""

    def __init__(self, heads: PoolerHeads, embedding: Transformer | None = None) -> None:
        """`embedding`: the model whose embedding table a sparse head multiplies with; None: the model has the head."""
        self._heads = heads
        self._spec = heads.spec
        self._model = embedding

    def start(self, params: PoolingParams) -> _Pooling:
        """The state of a new sequence."""
        if self._spec.sparse_head is not None:
            return _Sparse(self._spec.sparse_head, self._vocabulary_logits)
        if params.task.startswith("token_") or (self._spec.classify_tokens and params.task != "embed"):
            return _All()
        return _POOLINGS[params.pooling_type or self._spec.pooling_type]()

    def steps(self, hidden: Tensor, tokens: TokenArray, params: PoolingParams) -> Tensor:
        """The hidden states that results are made of: those of some tokens only, if the model rates steps."""
        if self._spec.step_tag is None or not params.task.startswith("token_"):
            return hidden
        return hidden[torch.from_numpy(np.flatnonzero(tokens == self._spec.step_tag)).to(hidden.device)]

    def finish(self, state: _Pooling, params: PoolingParams) -> PooledArray:
        """The array of a sequence whose tokens were all added."""
        pooled = state.result()
        match params.task:
            case "embed" | "token_embed":
                array = self._embedding(pooled, params)
            case _:
                array = self._labels(pooled, params)
        return array.cpu().numpy()

    def _embedding(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        heads, spec = self._heads, self._spec
        if spec.sparse_head is not None:
            return pooled
        steps = heads.embed if params.task == "embed" else heads.token_embed
        vectors = run_steps(steps, pooled.float())
        if (size := params.dimensions or spec.default_dimensions) is not None:
            vectors = vectors[..., :size]
        normalize = spec.normalize if params.use_activation is None else params.use_activation
        return F.normalize(vectors, dim=-1) if normalize else vectors.contiguous()

    def _vocabulary_logits(self, hidden: Tensor) -> Tensor:
        assert self._heads.sparse_head is not None
        if self._model is None:  # its outputs are the logits
            return hidden.float()
        table = self._model.embed.weight
        assert table is not None
        logits: Tensor = self._heads.sparse_head(hidden, table)
        return logits

    def _labels(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        spec = self._spec
        logits = run_steps(self._heads.classify, pooled.float())
        if spec.classify_tokens:
            logits = logits.mean(0)
        if spec.subtract_labels:
            logits = logits[..., -1:] - logits[..., :1]
        logits = (logits - spec.logit_mean) / spec.logit_sigma
        act = spec.label_act if params.use_activation is not False else "none"
        if params.use_activation and act == "none":
            act = "sigmoid" if len(spec.labels) == 1 else "softmax"
        if act == "none":
            return logits
        return logits.sigmoid() if act == "sigmoid" else logits.softmax(-1)


class ChunkPooler:
    """Keep the pooled states of the pooling requests in the batch of a decoder, by row of the request table."""

    def __init__(self, table: RequestTable, pooler: Pooler) -> None:
        self._table = table
        self._pooler = pooler
        self._rows: dict[int, _Pooling] = {}

    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        """Follow the rows of the table: some were freed, then some were filled."""
        for row in freed:
            self._rows.pop(row, None)
        for row in filled:
            params = self._table[row].params
            if isinstance(params, PoolingParams) and params.task != "align":
                self._rows[row] = self._pooler.start(params)

    @property
    def rows(self) -> Collection[int]:
        """Rows of pooling requests."""
        return self._rows

    def pool(self, hidden: Tensor, span: Span) -> PooledArray | None:
        """Add the hidden states (span.count, hidden) of a span of one of `rows`; the array once it is complete."""
        row = self._table[span.row]
        params = row.params
        assert isinstance(params, PoolingParams)
        state = self._rows[span.row]
        skipped = min(span.count, max(0, params.skip_tokens - span.start))
        tokens = self._table.tokens[span.row, span.start + skipped : span.length]
        state.add(self._pooler.steps(hidden[skipped:], tokens, params))
        return self._pooler.finish(state, params) if span.length == row.prompt_len else None


def add_pooled(result: StepResult, request_id: str, array: PooledArray) -> None:
    """Add the array of a request to the result of a step; an error if it holds NaN or infinity."""
    if np.isfinite(array).all():
        result.pooled[request_id] = array
    else:
        result.errors[request_id] = NOT_FINITE


def hidden_states() -> Pooler:
    """The pooler of a model that generates: its hidden states as they are."""
    return Pooler(PoolerHeads(PoolerSpec(tasks=("embed", "token_embed"), normalize=False), 0, 0))

"""Mixtures of experts on CPUs: the kernel calls of each expert, captured once, and replayed for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, Workspace, empty

_ROWS = 512  # tokens that an expert computes at a time

# Computes the outputs (rows, hidden) of an expert from its inputs, and writes them to the second tensor.
ExpertFunction = Callable[[Tensor, Tensor], object]


class ExpertMemory:
    """What experts read and write: all layers of a model share it, as one expert runs at a time.

    The system gives it memory as far as tokens have the same expert.
    """

    def __init__(self, hidden: int) -> None:
        """`hidden`: inputs and outputs of an expert."""
        self._hidden = hidden
        self.workspace = Workspace(_ROWS)
        self._rows: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and results of an expert, (rows, hidden) each."""
        if dtype not in self._rows:
            shape = (_ROWS, self._hidden)
            self._rows[dtype] = self.workspace.empty(shape, dtype), self.workspace.empty(shape, dtype)
        return self._rows[dtype]


class ExpertCalls:
    """The captured calls of the experts of a layer, or of those that a rank has."""

    def __init__(self, captured: Sequence[CapturedCalls], rows: tuple[Tensor, Tensor], first: int) -> None:
        """Use captured calls; see `capture`."""
        self._captured = captured  # which own the memory between their calls
        self._calls = [expert.calls for expert in captured]
        self._inputs, self._results = rows
        self._first = first

    @classmethod
    def capture(
        cls, experts: Sequence[ExpertFunction], memory: ExpertMemory, dtype: torch.dtype, first: int
    ) -> ExpertCalls | None:
        """Capture what experts do, without doing it. None if some do more than to call kernels.

        Args:
            experts: those of a layer.
            memory: what they work in.
            dtype: of inputs and outputs.
            first: the index of the first expert among those of the router.
        """
        rows = memory.rows(dtype)
        captured = []
        for expert in experts:
            run = partial(expert, *(x[:1] for x in rows))
            captured.append(CapturedCalls(run, memory.workspace, (1, 1), runs=False))
            if not captured[-1].complete:
                return None
        return cls(captured, rows, first)

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, *, weighs_inputs: bool) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: (tokens, hidden).
            chosen: (tokens, top_k) int64, indices of experts; those that are not captured here are left out.
            weights: (tokens, top_k) float32, which are rounded to x's dtype.
            weighs_inputs: weights are multiplied with what an expert reads, not with what it returns.
        """
        out = empty(x.shape, x.dtype)
        native.kernels.run_experts(
            x=x,
            chosen=chosen,
            weights=weights,
            experts=self._calls,
            first=self._first,
            inputs=self._inputs,
            results=self._results,
            out=out,
            weighs_inputs=int(weighs_inputs),
        )
        return out

"""Step graphs: the kernel calls of whole steps, captured once and then replayed without Python."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import PreparedAttention
from quire.engine.execution.inputs import StepInputs
from quire.engine.models.decoder import LanguageModel, compute_logits
from quire.kernels.capture import CapturedCalls, Workspace

MAX_TOKENS = 1024  # of a captured step; larger ones take so long that Python between the kernels does not matter
_MAX_LOGITS_ROWS = 128  # sequences whose logits fit into the output buffer
_WARM_UP = 3  # eager steps of each kind before the next one is captured


class StepRunner(Protocol):
    """Runs the steps in which every sequence needs the logits of its last token only."""

    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        """Logits (num_logits, vocab) float32, valid until the next call."""


class EagerSteps(StepRunner):
    """Runs every step layer by layer."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @override
    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        hidden = self._model.run(inputs.model, attention.attend, last_token_only=True, cross=attention.cross)
        return compute_logits(self._model.lm_head, hidden)


class StepGraphs(StepRunner):
    """Captures steps with static inputs and replays them.

    There are two graphs: one for steps in which logits are computed for every token, one for the others. A step whose
    model also computes with torch, as in a mixture of experts, cannot be captured and always runs eagerly.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._eager = EagerSteps(model)
        self._workspace = Workspace(MAX_TOKENS)
        self._logits: Tensor | None = None  # output buffer (_MAX_LOGITS_ROWS, vocab)
        self._steps_seen: Counter[bool] = Counter()
        self.graphs: dict[bool, CapturedCalls] = {}
        self.not_capturable: set[bool] = set()

    @override
    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        rows = inputs.num_logits
        if not attention.static or rows > _MAX_LOGITS_ROWS or inputs.model.items is not None:
            return self._eager.logits(inputs, attention)
        if self._logits is None:
            self._logits = torch.empty(_MAX_LOGITS_ROWS, self._model.lm_head.vocab_size)
        out = self._logits[:rows]
        counts = (inputs.num_tokens, rows)  # by RowKind
        every_token = inputs.model.logits_indices is None
        graph = self.graphs.get(every_token)
        if graph is not None:
            graph.replay(counts)
        elif every_token in self.not_capturable or self._steps_seen[every_token] < _WARM_UP or rows == 0:
            self._steps_seen[every_token] += 1
            self._compute(inputs, attention, out)
        else:
            self._capture(inputs, attention, out)
        return self._model.lm_head.adjust(out)

    def _compute(self, inputs: StepInputs, attention: PreparedAttention, out: Tensor) -> None:
        hidden = self._model.run(inputs.model, attention.attend, last_token_only=True, cross=attention.cross)
        self._model.lm_head.project(hidden, out=out)

    def _capture(self, inputs: StepInputs, attention: PreparedAttention, out: Tensor) -> None:
        counts = (inputs.num_tokens, inputs.num_logits)
        calls = CapturedCalls(lambda: self._compute(inputs, attention, out), self._workspace, counts)
        every_token = inputs.model.logits_indices is None
        if calls.complete:
            self.graphs[every_token] = calls
        else:
            self.not_capturable.add(every_token)
            self._workspace = Workspace(MAX_TOKENS)  # frees what this capture allocated

"""Step graphs: the kernel calls of whole steps, captured once and then replayed without Python."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.inputs import StepInputs
from quire.engine.models.networks.decoder import LanguageModel
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.sampling import TokenChoices

MAX_TOKENS = 1024  # of a captured step; larger ones take so long that Python between the kernels does not matter
_MAX_LOGITS_ROWS = 128  # sequences whose logits fit into the output buffer
_WARM_UP = 3  # eager steps of each kind before the next one is captured

_Kind = tuple[bool, int | None]  # of a graph: logits are computed for every token; the adapter of all rows


class StepRunner(Protocol):
    """Run the steps in which every sequence needs the logits of its last token only."""

    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        """Logits (num_logits, vocab) float32, valid until the next call."""

    def decode(self, inputs: StepInputs, choices: TokenChoices, inbox: int | None) -> list[list[int]] | None:
        """Run decode steps that follow a step, after which a token was chosen for each sequence.

        They end when something can be read from `inbox`, a file descriptor.

        Returns:
            The tokens of each of the step's spans, see `CapturedCalls.decode`; None: the steps need Python, as all do
            where this is not overridden.
        """
        return None


class EagerSteps(StepRunner):
    """Run every step layer by layer."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @override
    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        hidden = self._model.run(inputs.model, attention.attend, last_token_only=True, cross=attention.cross)
        return self._model.lm_head.logits(hidden)[: inputs.num_logits]


class StepGraphs(StepRunner):
    """Capture steps with static inputs and replay them.

    There are two graphs: one for steps in which logits are computed for every token, one for the others; and as many
    for steps whose rows all have the same adapter. A step of which only some rows have it runs eagerly; so does one
    whose model also computes with torch, as in a linear recurrence, which cannot be captured.
    """

    def __init__(self, model: LanguageModel, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention
        self._eager = EagerSteps(model)
        self._workspace = Workspace(MAX_TOKENS)
        self._logits: Tensor | None = None  # output buffer (_MAX_LOGITS_ROWS, vocab)
        self._steps_seen: Counter[_Kind] = Counter()
        self.graphs: dict[_Kind, CapturedCalls] = {}
        self.not_capturable: set[_Kind] = set()

    @override
    def logits(self, inputs: StepInputs, attention: PreparedAttention) -> Tensor:
        rows = inputs.num_logits
        if not attention.static or not _is_replayable(inputs):
            return self._eager.logits(inputs, attention)
        if self._logits is None:
            self._logits = torch.empty(_MAX_LOGITS_ROWS, self._model.lm_head.vocab_size)
        out = self._logits[:rows]
        counts = (inputs.num_tokens, rows)  # by RowKind
        kind = _kind(inputs)
        graph = self.graphs.get(kind)
        if graph is not None:
            graph.replay(counts)
        elif kind in self.not_capturable or self._steps_seen[kind] < _WARM_UP or rows == 0:
            self._steps_seen[kind] += 1
            self._compute(inputs, attention, out)
        else:
            self._capture(inputs, attention, out, kind)
        return out

    @override
    def decode(self, inputs: StepInputs, choices: TokenChoices, inbox: int | None) -> list[list[int]] | None:
        graph = self.graphs.get(_kind(inputs))
        if graph is None or self._logits is None or inputs.arrays is None:
            return None
        if not _is_replayable(inputs) or not self._attention.prepare_following(inputs, choices.steps):
            return None
        rows, starts = [span.row for span in inputs.spans], [span.length for span in inputs.spans]
        return graph.decode(inputs.arrays, rows, starts, self._logits[: len(rows)], choices, inbox)

    def _compute(self, inputs: StepInputs, attention: PreparedAttention, out: Tensor) -> None:
        hidden = self._model.run(inputs.model, attention.attend, last_token_only=True, cross=attention.cross)
        self._model.lm_head.logits(hidden, out=out)

    def _capture(self, inputs: StepInputs, attention: PreparedAttention, out: Tensor, kind: _Kind) -> None:
        counts = (inputs.num_tokens, inputs.num_logits)
        calls = CapturedCalls(lambda: self._compute(inputs, attention, out), self._workspace, counts)
        if calls.complete:
            self.graphs[kind] = calls
        else:
            self.not_capturable.add(kind)
            self._workspace = Workspace(MAX_TOKENS)  # frees the memory that this capture allocated


def _is_replayable(inputs: StepInputs) -> bool:
    """Whether all inputs of a step whose attention is static are at fixed addresses, and all rows have one adapter."""
    lora_ids = inputs.model.lora_ids
    is_mixed = lora_ids is not None and lora_ids.only is None
    return inputs.num_logits <= _MAX_LOGITS_ROWS and inputs.model.is_replayable and not is_mixed


def _kind(inputs: StepInputs) -> _Kind:
    """Return which graph computes a step."""
    lora_ids = inputs.model.lora_ids
    return inputs.model.logits_indices is None, None if lora_ids is None else lora_ids.only

"""What the model runner needs of an attention backend."""

from __future__ import annotations

from typing import Protocol

from quire.engine.execution.batch import StepInputs
from quire.engine.models.layers.step import Attend


class AttentionBackend(Protocol):
    """Owns the KV cache's layout."""

    def plan(self, inputs: StepInputs) -> Attend:
        """Prepare what all layers of a step share; gives the attention that they call.

        A call writes the keys and values of the whole step before any of its queries reads, so sequences of one step
        may share the blocks that it fills.
        """

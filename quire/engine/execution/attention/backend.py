"""The interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.engine.execution.inputs import StepInputs
from quire.engine.models.layers.inputs import StepAttention, StepCrossAttention


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """The attention of one step.

    Attributes:
        attend: the function that the layers call.
        cross: the function that layers with cross-attention call; None in models without it.
        static: it reads nothing but the step's static inputs, so that its kernel calls can be replayed in other steps.
    """

    attend: StepAttention
    static: bool
    cross: StepCrossAttention | None = None


class AttentionBackend(Protocol):
    """Attention over one KV cache."""

    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        """Prepare the inputs that all layers of a step share.

        `attend` writes the keys and values of the whole step before any query reads, so sequences of one step may
        share the blocks that the step fills.
        """

    def prepare_following(self, inputs: StepInputs, steps: int) -> bool:
        """Prepare decode steps that follow a step which was prepared.

        Returns:
            Whether `attend` needs nothing else than their static inputs; it never does where this is not overridden.
        """
        return False

"""RunAhead: how many decode steps run before the scheduler learns of their tokens (multi-step scheduling)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.scheduling.block_tables import BlockTables
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.engine.scheduling.request import Request
from quire.engine.scheduling.state_snapshots import StateSnapshots

_BURST = 0.06  # seconds that steps take together: their tokens come in one output. A message ends them earlier


class RunAhead:
    """Choose the further steps of a step in which every sequence decodes one token.

    Scheduling, outputs and messages take a few tenths of a millisecond of each step, and the event loop sends each
    output: as long as a tenth of a small model's step. Further steps share them.
    """

    def __init__(self, limits: SchedulerLimits, tables: BlockTables, snapshots: StateSnapshots | None) -> None:
        """`limits`, `tables`, `snapshots`: those of the scheduler."""
        self._limits = limits
        self._tables = tables
        self._snapshots = snapshots
        self._most = 0  # further steps, by the time that the last ones took

    def measure(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Note how long the steps of a plan have taken, if all of its sequences decoded."""
        if self._limits.max_further_steps and plan.num_tokens == len(result.sampled) > 0:
            steps = max(len(sampled.tokens) for sampled in result.sampled)
            self._most = min(self._limits.max_further_steps, max(0, int(_BURST * steps / seconds) - 1))

    def choose(self, running: Sequence[Request], free_blocks: int) -> int:
        """Return how many steps may follow the next one, in which each of `running` computes its last token.

        They preempt no sequence, end where one has its last token, and where states are to be saved.
        """
        most = self._most
        for request in running:
            if most == 0:
                return 0
            most = min(most, self._most_of(request))
        ends = [(request, request.num_computed_tokens + 1 + most) for request in running]
        needed = sum(max(0, self._tables.missing(request, end)) for request, end in ends)
        return most if needed <= free_blocks else 0

    def _most_of(self, request: Request) -> int:
        """Return how many further tokens a sequence may compute."""
        if not request.generates or request.num_computed_tokens < request.prompt_len:
            return 0
        most = request.max_draft(self._limits.max_model_len, self._limits.rope_switch)
        if self._snapshots is not None:
            most = self._snapshots.room_for_draft(request.num_computed_tokens + 1, most)
        return most

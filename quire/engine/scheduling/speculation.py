"""Speculation: which sequences of a step get drafts, and how long these are."""

from __future__ import annotations

from quire.engine.client.protocol import StepStats
from quire.engine.scheduling.block_tables import BlockTables
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens
from quire.engine.scheduling.request import Request

# A step of up to this many tokens takes about as long as one token: reading the weights dominates on a CPU.
_MEMORY_BOUND_TOKENS = 24


class Speculation:
    """Limit the draft tokens of each step, and count the accepted ones. Drafts come from `Request.drafter`."""

    def __init__(self, limits: SchedulerLimits, tables: BlockTables) -> None:
        """`limits`, `tables`: those of the scheduler."""
        self._limits = limits
        self._tables = tables
        self._left = 0  # draft tokens that this step may still have
        self._drafting = 0  # sequences of this step that have a draft

    def begin_step(self, decoding: int) -> None:
        """Begin to schedule a step. `decoding`: number of sequences that need one token."""
        self._left, self._drafting = max(0, _MEMORY_BOUND_TOKENS - decoding), 0

    def draft(self, request: Request, room: int) -> tuple[int, ...]:
        """At most `room` draft tokens for a sequence that needs only its next token; () for other sequences.

        A draft never preempts a sequence.
        """
        if request.drafter is None or not request.generates or request.steps_in_flight:
            return ()
        if self._drafting == self._limits.max_drafting:
            return ()
        if len(request.tokens) - request.num_computed_tokens != 1 or request.num_computed_tokens < request.prompt_len:
            return ()
        fitting = self._tables.room(request) - len(request.tokens)
        longest = request.max_draft(self._limits.max_model_len, self._limits.rope_switch)
        draft = request.drafter.draft(request.tokens, min(room, self._left, fitting, longest))
        self._left -= len(draft)
        self._drafting += bool(draft)
        return draft

    def record(self, request: Request, sampled: SampledTokens, drafted: int, stats: StepStats) -> None:
        """Count the accepted tokens of a verified draft of `drafted` tokens; 0: the sequence had no draft."""
        if drafted and request.drafter is not None:
            accepted = len(sampled.tokens) - 1
            request.drafter.update(drafted, accepted)
            request.draft_tokens += drafted
            request.accepted_tokens += accepted
            stats.drafts += 1
            stats.drafted_tokens += drafted
            stats.accepted_tokens += accepted
            positions = stats.accepted_per_position
            positions.extend([0] * (accepted - len(positions)))
            for position in range(accepted):
                positions[position] += 1

"""The search of one prompt's likeliest answers. Candidates are ranked, and the search is ended, as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.api.serving.beams.options import BeamOptions
from quire.engine.wire.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or the beginning of one.

    Attributes:
        logprob: of all its tokens.
        entries: log-probabilities of each token; empty if they are not reported.
        finished: why it has ended; None if it goes on.
    """

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()
    finished: str | None = None


@dataclass(slots=True)
class BeamSearch:
    """Extends beams by one token at a time.

    Attributes:
        running: the beams to be extended, best first; empty at the end of the search.
        best: the best beams that have ended, with their scores, best first.
    """

    options: BeamOptions
    max_tokens: int
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    best: list[tuple[float, Beam]] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """How many next tokens of each beam are needed: if all ends are among them, enough others are left."""
        ends = len(self.options.eos_token_ids | self.options.stop_token_ids)
        return max(2, 1 + ends) * self.options.width

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """Extend the beams, given the log-probabilities after each: the likeliest tokens follow the first one."""
        options = self.options
        ranked = sorted(
            (
                (beam.logprob + logprob, beam, report, index)
                for beam, report in zip(self.running, reports, strict=True)
                for index, logprob in enumerate(report.logprobs[1:], 1)
            ),
            key=lambda candidate: -candidate[0],
        )[: self.candidates]
        going_on: list[Beam] = []
        for place, (logprob, beam, report, index) in enumerate(ranked):
            ends = self._end(report.token_ids[index], len(beam.tokens) + 1)
            # Of those that end, only the best are answers; of the others, there are enough without them.
            if place < options.width if ends else len(going_on) < options.width:
                extended = _extended(beam, logprob, report, index, ends, options.logprobs)
                if ends:
                    self.best.append((self._score(extended), extended))
                else:
                    going_on.append(extended)
        self.best = sorted(self.best, key=lambda found: -found[0])[: options.width]
        self.running = going_on if going_on and self._may_improve(going_on[0]) else []

    def _end(self, token: int, length: int) -> str | None:
        if token in self.options.eos_token_ids or token in self.options.stop_token_ids:
            return "stop"
        return "length" if length >= self.max_tokens else None

    def _score(self, beam: Beam) -> float:
        score: float = beam.logprob / len(beam.tokens) ** self.options.length_penalty
        return score

    def _may_improve(self, best: Beam) -> bool:
        """Whether the best beam that goes on would, at its present length, be among the answers."""
        return len(self.best) < self.options.width or self._score(best) > self.best[-1][0]


def _extended(
    beam: Beam, logprob: float, report: TokenLogprobs, index: int, finished: str | None, alternatives: int | None
) -> Beam:
    token = report.token_ids[index]
    entries = beam.entries
    if alternatives is not None:
        columns = (report.token_ids, report.logprobs, report.ranks)
        entries = (*entries, TokenLogprobs(*([one[index], *one[1 : 1 + alternatives]] for one in columns)))
    return Beam((*beam.tokens, token), logprob, entries, finished)

"""Beam search for one prompt. Candidates are ranked, and the search is ended, as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.protocol import TokenLogprobs
from quire.serving.beams.options import BeamOptions


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or the beginning of one.

    Attributes:
        logprob: log-probability of all its tokens.
        entries: log-probabilities of each token; empty if they are not reported.
        finished: the finish reason; None while it is extended.
    """

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()
    finished: str | None = None


@dataclass(slots=True)
class BeamSearch:
    """Extend beams by one token at a time.

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
        return self.options.width + len(self.options.eos_token_ids | self.options.stop_token_ids)

    def advance(self, reports: Sequence[TokenLogprobs]) -> None:
        """Extend the beams. `reports`: after each, the sampled token and then the most likely ones, best first."""
        options = self.options
        totals = np.array([report.logprobs[1:] for report in reports], np.float64)
        totals += np.array([[beam.logprob] for beam in self.running], np.float64)
        totals[~self._allowed(reports)] = -np.inf
        ranked = np.argsort(-totals, axis=None, kind="stable")
        going_on: list[Beam] = []
        for place, candidate in enumerate(ranked.tolist()):
            if place >= options.width and len(going_on) == options.width:
                break
            row, column = divmod(candidate, totals.shape[1])
            beam, report, index = self.running[row], reports[row], column + 1  # the first one is the sampled token
            logprob = float(totals[row, column])
            if logprob == -np.inf:
                break
            ends = self._end(report.token_ids[index], len(beam.tokens) + 1)
            # Those that end are answers only if they are among the best.
            if place < options.width if ends else len(going_on) < options.width:
                extended = _extended(beam, logprob, report, index, ends, options.logprobs)
                if ends:
                    self.best.append((self._score(extended), extended))
                else:
                    going_on.append(extended)
        self.best = sorted(self.best, key=lambda scored: -scored[0])[: options.width]
        self.running = going_on if going_on and self._may_improve(going_on[0]) else []

    def lacks_candidates(self, reports: Sequence[TokenLogprobs]) -> bool:
        """Whether so many of the reported tokens are forbidden that others might be among the best."""
        return bool(self._allowed(reports).sum(axis=1).min() < self.candidates)

    def _allowed(self, reports: Sequence[TokenLogprobs]) -> NDArray[np.bool_]:
        """(beams, reported tokens)."""
        forbids = self.options.forbids
        if forbids is None:
            return np.ones((len(reports), len(reports[0].token_ids) - 1), np.bool_)
        return np.array(
            [
                [not forbids(token, len(beam.tokens)) for token in report.token_ids[1:]]
                for beam, report in zip(self.running, reports, strict=True)
            ]
        )

    def _end(self, token: int, length: int) -> str | None:
        if token in self.options.eos_token_ids or token in self.options.stop_token_ids:
            return "stop"
        return "length" if length >= self.max_tokens else None

    def _score(self, beam: Beam) -> float:
        score: float = beam.logprob / len(beam.tokens) ** self.options.length_penalty
        return score

    def _may_improve(self, best: Beam) -> bool:
        """Whether the best running beam would, at its present length, be among the answers."""
        return len(self.best) < self.options.width or self._score(best) > self.best[-1][0]


def _extended(
    beam: Beam, logprob: float, report: TokenLogprobs, index: int, finished: str | None, alternatives: int | None
) -> Beam:
    token = report.token_ids[index]
    entries = beam.entries
    if alternatives is not None:
        columns = (report.token_ids, report.logprobs, report.ranks)
        entries = (*entries, TokenLogprobs(*([column[index], *column[1 : 1 + alternatives]] for column in columns)))
    return Beam((*beam.tokens, token), logprob, entries, finished)

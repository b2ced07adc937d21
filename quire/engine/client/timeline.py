"""Timeline: where the time of one HTTP request went, over all of its sequences, and the times of each of these."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

import msgspec


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """Monotonic seconds at which a request has passed a border; 0 for one that it has not reached.

    Attributes:
        arrived: the head of the HTTP request was read; see `Origin`.
        rendered: its prompt was complete.
        queued: it was sent to the engine.
        scheduled: it was in a step for the first time.
        first_token, last_token: a step has brought tokens.
        sent: its reader has taken all output, and a stream has sent it; or the request was given up.
    """

    arrived: float = 0.0
    rendered: float = 0.0
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    sent: float = 0.0


@dataclass(slots=True)
class Phase:
    """The time in which something is done for a request, by one of its tasks or by several at once. A context.

    Attributes:
        seconds: in all contexts that have ended.
    """

    seconds: float = 0.0
    _running: int = 0
    _begun: float = 0.0

    def __enter__(self) -> None:
        if not self._running:
            self._begun = time.monotonic()
        self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running -= 1
        if not self._running:
            self.seconds += time.monotonic() - self._begun


@dataclass(slots=True)
class Timeline:
    """Times and tokens of a request. Of its sequences that have ended, the earliest start and the latest end.

    Attributes:
        media: its media are read and prepared.
        tokenizing: its chat template is rendered, and texts are tokenized.
        queued, scheduled, first_token, last_token, sent: as of `RequestTimes`; 0 while no sequence has ended.
        prompt_tokens, cached_tokens, output_tokens: sums over sequences.
    """

    media: Phase = field(default_factory=Phase)
    tokenizing: Phase = field(default_factory=Phase)
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    sent: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add_times(self, times: RequestTimes) -> None:
        """Add the times of a sequence that has ended."""
        self.queued = _earliest(self.queued, times.queued)
        self.scheduled = _earliest(self.scheduled, times.scheduled)
        self.first_token = _earliest(self.first_token, times.first_token)
        self.last_token = max(self.last_token, times.last_token)
        self.sent = max(self.sent, times.sent)

    def add_tokens(self, prompt: int, cached: int, output: int) -> None:
        """Add the numbers of tokens of a sequence that has ended."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output


def _earliest(first: float, second: float) -> float:
    """The earlier of two times, of which 0 is none."""
    return min(first, second) if first and second else first or second

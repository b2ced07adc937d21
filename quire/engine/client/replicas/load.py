"""Load: the tokens that a replica has yet to compute, as the front end knows them, or several of them together."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_GUESS = 128.0  # tokens of an answer before any has ended
_MEMORY = 0.05  # weight of the last answer in the usual length


class Load:
    """The tokens of a replica's requests that are not computed yet: of prompts, and of answers as they usually are."""

    def __init__(self) -> None:
        self.tokens_here = 0.0
        self.requests_here = 0

    @property
    def tokens(self) -> float:
        """Those of all front ends."""
        return self.tokens_here

    @property
    def requests(self) -> int:
        """Those of all front ends."""
        return self.requests_here

    def add(self, tokens: float, requests: int) -> None:
        """Count tokens and requests of this front end; or fewer than before."""
        self.requests_here += requests
        self.tokens_here = self.tokens_here + tokens if self.requests_here else 0.0  # without the errors of sums

    def begin(self, prompt: float, answer: float) -> Work:
        """Count a request.

        Args:
            prompt: tokens of its prompt that are not cached.
            answer: tokens that it is expected to generate.
        """
        return Work(self, prompt, answer)


class Work:
    """The part of a load that is one request's."""

    __slots__ = ("_answer", "_is_open", "_load", "_prompt", "generated")

    def __init__(self, load: Load, prompt: float, answer: float) -> None:
        self.generated = 0
        self._load = load
        self._prompt = prompt
        self._answer = answer
        self._is_open = True
        load.add(prompt + answer, 1)

    def extend(self, tokens: int) -> None:
        """The prompt has got more tokens."""
        if self._is_open:
            self._prompt += tokens
            self._load.add(tokens, 0)

    def advance(self, tokens: int) -> None:
        """Tokens were generated, after the prompt was computed."""
        self.generated += tokens
        if self._is_open:
            done = self._prompt + min(tokens, self._answer)
            self._answer = max(0.0, self._answer - tokens)
            self._prompt = 0.0
            self._load.add(-done, 0)

    def end(self) -> None:
        """The replica has nothing left to do for the request. Calls after the first have no effect."""
        if self._is_open:
            self._is_open = False
            self._load.add(-self._prompt - self._answer, -1)

    def end_and_tell(self, ended: Callable[[], None] | None) -> Callable[[], None]:
        """Return what ends this, and then calls `ended`."""

        def both() -> None:
            self.end()
            if ended is not None:
                ended()

        return both


class AnswerLength:
    """How many tokens answers usually have, of the answers that have ended."""

    def __init__(self) -> None:
        self._tokens = _FIRST_GUESS

    def expected(self, most: int) -> float:
        """Return how many tokens an answer is expected to have that may have `most`."""
        return min(float(most), self._tokens)

    def ended(self, tokens: int) -> None:
        """Note the length of an answer that has ended."""
        self._tokens += _MEMORY * (tokens - self._tokens)

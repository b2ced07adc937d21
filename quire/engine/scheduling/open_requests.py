"""OpenRequests: requests whose prompts arrive in pieces."""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.client.protocol import MediaItem
from quire.engine.scheduling.plan import NewSequence, PromptExtension
from quire.engine.scheduling.request import Request


class OpenRequests:
    """Keep the requests whose prompts are not complete.

    Attributes:
        waiting_for_input: ids of those that hold no blocks and are not in the queue until their prompts grow.
    """

    def __init__(self) -> None:
        self.waiting_for_input: set[str] = set()
        self._open: dict[str, Request] = {}
        self._extended: list[tuple[Request, tuple[int, ...]]] = []  # since the last plan

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def all_idle(self) -> bool:
        """Whether each of them waits for more of its prompt."""
        return all(name in self.waiting_for_input or request.is_idle for name, request in self._open.items())

    def add(self, request: Request) -> None:
        """Keep a request if more of its prompt follows."""
        if request.held_back:
            self._open[request.id] = request

    def discard(self, request: Request) -> None:
        """A request has left the scheduler."""
        self._open.pop(request.id, None)
        self.waiting_for_input.discard(request.id)

    def refusal(self, request: Request, count: int, longest: int) -> str | None:
        """Why `count` tokens cannot be appended to a prompt of at most `longest`; None if they can."""
        if request.id not in self._open:
            return "the prompt is already complete"
        if len(request.tokens) + count > longest:
            return f"the prompt would have more than {longest} tokens"
        return None

    def extend(self, request: Request, tokens: list[int], *, last: bool, items: tuple[MediaItem, ...] = ()) -> bool:
        """Append to the prompt of one of the requests; returns whether it waited for input and can continue."""
        request.extend(tokens, last=last, items=items)
        if last:
            del self._open[request.id]
        if request.in_batch and tokens:
            self._extended.append((request, tuple(tokens)))
        resumes = request.id in self.waiting_for_input and (last or bool(tokens))
        if resumes:
            self.waiting_for_input.remove(request.id)
        return resumes

    def take_extensions(self, entered: Collection[NewSequence]) -> list[PromptExtension]:
        """The tokens appended to prompts of sequences in the batch, except sequences that enter it in this step."""
        extended, self._extended = self._extended, []
        names = {new.request_id for new in entered}
        return [
            PromptExtension(request.id, tokens, request.rotary_positions())
            for request, tokens in extended
            if request.in_batch and request.id not in names
        ]

    def check(self) -> None:
        """Assert that requests that wait for input are open."""
        assert self.waiting_for_input <= self._open.keys(), "a request with a complete prompt waits for input"

"""The limits of a response that span its turns: its timeout and `max_output_tokens`."""

from __future__ import annotations

import dataclasses

from msgspec import structs

from quire.api.chat.prepare import PreparedChat
from quire.engine.client.deadline import Deadline


class ResponseLimits:
    """Limit the turns of a response."""

    def __init__(self, deadline: Deadline, tokens: int | None) -> None:
        """`deadline`: of all turns together; `tokens`: `max_output_tokens`."""
        self.deadline = deadline
        self._tokens = tokens

    def tokens_left(self, used: int) -> bool:
        """Return whether more tokens may be generated."""
        return self._tokens is None or used < self._tokens

    def apply(self, turn: PreparedChat, used: int) -> PreparedChat:
        """A later turn, limited to the tokens and the time that are left."""
        (request,) = turn.requests
        max_tokens = request.params.max_tokens
        if self._tokens is not None:
            max_tokens = min(self._tokens - used, turn.model.info.max_model_len - len(request.prompt))
        params = structs.replace(request.params, max_tokens=max_tokens)
        request = structs.replace(request, params=params, deadline=self.deadline)
        return dataclasses.replace(turn, requests=[request])
